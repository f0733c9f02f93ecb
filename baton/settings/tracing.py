"""Settings for exporting the OpenTelemetry spans of a process (docs/metrics.md)."""

from typing import Annotated

from pydantic import AfterValidator, Field

from baton.settings.base import settings


def _endpoint(url: str) -> str:
    if url and not url.startswith(("http://", "https://")):
        raise ValueError(f"{url} is not a URL: begin it with http://, or with https:// for TLS")
    return url


@settings
class TraceExport:
    """Settings for exporting spans to an OpenTelemetry collector."""

    otlp_endpoint: Annotated[str, AfterValidator(_endpoint)] = ""
    """Address of the collector that receives spans by OTLP over gRPC, like http://127.0.0.1:4317. Empty: no export."""
    trace_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Fraction (0 to 1) of requests that are traced. Requests whose caller has disabled tracing are never traced."""
