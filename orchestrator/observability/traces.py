"""Keeps the latest requests that have ended, for `baton trace`, and sends their spans to an OpenTelemetry collector.

A request becomes one span, in the trace of the caller if it sent a `traceparent` (W3C trace context), and one span
below it for each stage, ranks' parts included. Workers send nothing: what they measured came with their answers, so
that one process exports, once for each request, after its end. Batches leave on a thread of OpenTelemetry's SDK; one
that a collector does not take in time is dropped, and said so in the log. Told by `orchestrator.observability.journal`
on the loop.
"""

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from baton import __version__
from baton.results.stages import Attributes
from orchestrator.observability.stages import Trace
from orchestrator.requests.request import Request

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

NUM_KEPT = 256
"""Most requests that are kept after their end."""


class Traces:
    """The latest requests of one orchestrator, and its exporter of spans if it has one."""

    def __init__(self, provider: "TracerProvider | None" = None) -> None:
        """`provider` makes the spans, and is shut down with this object; None: nothing is exported."""
        self._provider = provider
        self._tracer: Tracer | None = None if provider is None else provider.get_tracer("baton", __version__)
        self._latest: OrderedDict[tuple[str, str], Trace] = OrderedDict()
        """By tenant and request id: callers choose the ids."""

    def get(self, request_id: str) -> Trace | None:
        """Return the request of that id if it is among the latest that have ended: the one that ended first, if
        several tenants have used the id."""
        return next((trace for (_, each), trace in self._latest.items() if each == request_id), None)

    def ended(self, trace: Trace, request: Request) -> None:
        """Keep what is known of a request that has ended, and export its spans."""
        key = request.tenant.name, trace.request_id
        self._latest[key] = trace
        self._latest.move_to_end(key)
        while len(self._latest) > NUM_KEPT:
            self._latest.popitem(last=False)
        if self._tracer is not None:
            _export(self._tracer, trace, request)

    async def close(self) -> None:
        """Send the spans that wait, for some seconds at most."""
        if self._provider is not None:
            await asyncio.to_thread(self._provider.shutdown)


def _export(tracer: Tracer, trace: Trace, request: Request) -> None:
    """Make the spans of a request, with the times that its stages had."""
    timings, usage = trace.timings, trace.usage
    root = tracer.start_span(
        "generate",
        context=TraceContextTextMapPropagator().extract(dict(request.trace_context)),
        kind=SpanKind.SERVER,
        start_time=timings.received_ns,
        attributes={
            "baton.request_id": trace.request_id,
            "baton.tenant": request.tenant.name,
            "baton.priority": request.priority.value,
            "baton.attempts": usage.num_attempts,
            "baton.cached_tokens": usage.num_cached_tokens,
            "gen_ai.request.max_tokens": request.params.max_tokens,
            "gen_ai.usage.input_tokens": usage.num_prompt_tokens,
            "gen_ai.usage.output_tokens": usage.num_output_tokens,
            "gen_ai.response.finish_reasons": tuple(reason.value for reason in trace.reasons),
        },
    )
    for failure in trace.failures:
        known: Attributes = {
            "baton.attempt": failure.number,
            "error.type": failure.error,
            "exception.message": failure.reason,
        }
        root.add_event("attempt failed", known, failure.unix_ns)
    if trace.error:
        root.set_attribute("error.type", trace.error)
        root.set_status(Status(StatusCode.ERROR, trace.error))
    _export_stages(tracer, root, trace)
    root.end(max(timings.received_ns, timings.finished_ns))


def _export_stages(tracer: Tracer, root: Span, trace: Trace) -> None:
    below = set_span_in_context(root)
    for stage in trace.stages():
        attributes = dict(stage.attributes)
        if stage.rank is not None:
            attributes["baton.rank"] = stage.rank
        span = tracer.start_span(stage.name, context=below, start_time=stage.at.start_ns, attributes=attributes)
        span.end(stage.at.end_ns)
