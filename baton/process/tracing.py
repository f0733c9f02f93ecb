"""OpenTelemetry in a process: sends the caller's trace as gRPC metadata, and exports the process's own spans.

Uses the W3C trace context, and OTLP over gRPC. OpenTelemetry is an optional dependency (the extra `traces`). The check
whether a span exists does not import OpenTelemetry: if its API has not been imported yet, no span can exist.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from baton.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from baton.settings.tracing import TraceExport

_API = "opentelemetry.trace"


def has_span() -> bool:
    """Return True if this thread or task has a current OpenTelemetry span."""
    api = sys.modules.get(_API)
    return api is not None and api.get_current_span().get_span_context().is_valid


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """Return gRPC metadata that identifies the current span of this thread or task. A server that receives the metadata
    creates its spans as children of this span. Empty if there is no current span."""
    if not has_span():
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())


def provider_of(export: "TraceExport", about: Mapping[str, str]) -> "TracerProvider | None":
    """Return a provider that creates this process's spans, and exports them in batches on its own thread. Return None
    if no collector is configured.

    `about` holds attributes of the process, which are sent with each batch. The caller must shut the provider down,
    which is a blocking call. Raises ConfigError if OpenTelemetry is not installed.
    """
    if not export.otlp_endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    except ImportError as error:
        raise ConfigError("otlp_endpoint needs OpenTelemetry: run `pip install 'baton-serve[traces]'`") from error

    from baton import __version__

    resource = Resource.create({"service.name": "baton", "service.version": __version__, **about})
    share = TraceIdRatioBased(export.trace_share)
    sampler = ParentBased(share, remote_parent_sampled=share)  # a caller may lower the share, not raise it
    provider = TracerProvider(resource=resource, sampler=sampler, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=export.otlp_endpoint)))
    return provider


@asynccontextmanager
async def exported_spans(export: "TraceExport", about: Mapping[str, str]) -> "AsyncIterator[TracerProvider | None]":
    """Async context manager that yields a provider of spans, or None if no collector is configured (see `provider_of`).
    On exit, it exports the remaining spans and shuts the provider down, even after an error or a cancellation. The
    event loop is not blocked meanwhile."""
    provider = provider_of(export, about)
    try:
        yield provider
    finally:
        if provider is not None:
            await asyncio.to_thread(provider.shutdown)
