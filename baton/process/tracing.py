"""Spans of a process: the caller's trace as gRPC metadata, and the exporter of the process's own spans.

W3C trace context; OTLP over gRPC. OpenTelemetry is optional (the extra `traces`). A program that has a span has already
loaded its API, so the check for a span imports nothing.
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
    """Return whether this thread or task is in a span of OpenTelemetry."""
    api = sys.modules.get(_API)
    return api is not None and api.get_current_span().get_span_context().is_valid


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """Return the current span of this thread or task as metadata, so that the server's spans are below it; empty
    without a span."""
    if not has_span():
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())


def provider_of(export: "TraceExport", about: Mapping[str, str]) -> "TracerProvider | None":
    """Return the provider that makes this process's spans and exports them in batches, on a thread of its own; None if
    no collector is configured. `about` describes the process and is sent with each batch. The caller shuts the provider
    down, which blocks. Raises ConfigError without OpenTelemetry."""
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
    sampler = ParentBased(share, remote_parent_sampled=share)  # a caller may trace less, not more
    provider = TracerProvider(resource=resource, sampler=sampler, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=export.otlp_endpoint)))
    return provider


@asynccontextmanager
async def exported_spans(export: "TraceExport", about: Mapping[str, str]) -> "AsyncIterator[TracerProvider | None]":
    """Yield the provider of `provider_of`, and shut it down in the end. Its remaining spans are exported first, also
    when the block is left by an error or is cancelled. The event loop is not blocked meanwhile."""
    provider = provider_of(export, about)
    try:
        yield provider
    finally:
        if provider is not None:
            await asyncio.to_thread(provider.shutdown)
