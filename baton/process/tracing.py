"""Spans of a process: the caller's trace as gRPC metadata, and the exporter of the process's own spans.

W3C trace context; OTLP over gRPC. A program that only passes its trace on loads OpenTelemetry's API, and no more.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from baton.settings.tracing import TraceExport

_PROPAGATOR = TraceContextTextMapPropagator()


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """Return the current span of this thread or task as metadata, so that the server's spans are below it; empty
    without a span."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return tuple(carrier.items())


def provider_of(export: "TraceExport", about: Mapping[str, str]) -> "TracerProvider | None":
    """Return what makes this process's spans and exports them in batches, on a thread of its own; None where no
    collector is named. `about` is said of the process with each batch. Its owner shuts it down, which blocks."""
    if not export.otlp_endpoint:
        return None
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    from baton import __version__

    resource = Resource.create({"service.name": "baton", "service.version": __version__, **about})
    share = TraceIdRatioBased(export.trace_share)
    sampler = ParentBased(share, remote_parent_sampled=share)  # a caller may trace less, not more
    provider = TracerProvider(resource=resource, sampler=sampler, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=export.otlp_endpoint)))
    return provider


@asynccontextmanager
async def exported_spans(export: "TraceExport", about: Mapping[str, str]) -> "AsyncIterator[TracerProvider | None]":
    """Yield the provider of `provider_of`, and shut it down in the end. The spans that it has not exported yet are
    exported first, also when the block is left by an error or is cancelled; the loop runs on meanwhile."""
    provider = provider_of(export, about)
    try:
        yield provider
    finally:
        if provider is not None:
            await asyncio.to_thread(provider.shutdown)
