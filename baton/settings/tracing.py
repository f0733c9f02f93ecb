"""Settings of the export of a process's spans (docs/metrics.md)."""

from typing import Annotated

from pydantic import AfterValidator, Field

from baton.settings.base import settings


def _endpoint(url: str) -> str:
    if url and not url.startswith(("http://", "https://")):
        raise ValueError(f"{url} is not a URL: begin it with http://, or with https:// for TLS")
    return url


@settings
class TraceExport:
    """The export of spans to an OpenTelemetry collector."""

    otlp_endpoint: Annotated[str, AfterValidator(_endpoint)] = ""
    """Collector that gets each request's spans by OTLP over gRPC, like http://127.0.0.1:4317; empty: none does."""
    trace_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Fraction of requests that are traced; requests whose callers turned their own tracing off never are."""
