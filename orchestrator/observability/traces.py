"""Stores the traces of the requests that ended last, for `baton trace`, and exports spans to an OpenTelemetry
collector.

A request becomes one span with a child span for each stage, including the stages of prefill ranks. If the caller sent a
`traceparent` (W3C trace context), the span belongs to the caller's trace. Workers export nothing: their measurements
arrive with their answers, so one process exports each request once, after its end. A thread of OpenTelemetry's SDK
sends batches. A batch that the collector does not accept in time is dropped and logged. Called by
`orchestrator.observability.journal` on the loop.
"""

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING

from baton import __version__
from orchestrator.observability.stages import Trace
from orchestrator.requests.request import Request

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

NUM_KEPT = 256
"""Maximum number of ended requests that are stored."""


class Traces:
    """Traces of the requests of one orchestrator that ended last, and the exporter of spans if there is one."""

    def __init__(self, provider: "TracerProvider | None" = None) -> None:
        """`provider` makes the spans. It is shut down with this object. None: nothing is exported."""
        self._provider = provider
        self._tracer: Tracer | None = None if provider is None else provider.get_tracer("baton", __version__)
        self._latest: OrderedDict[tuple[str, str], Trace] = OrderedDict()
        """Traces by tenant and request id. The key has the tenant because ids are chosen by callers."""

    def get(self, request_id: str) -> Trace | None:
        """Return the stored trace of the request with this id; None if there is none. If several tenants used the id,
        return the trace of the request that ended first."""
        return next((trace for (_, each), trace in self._latest.items() if each == request_id), None)

    def ended(self, trace: Trace, request: Request) -> None:
        """Store the trace of an ended request, and export its spans."""
        key = request.tenant.name, trace.request_id
        self._latest[key] = trace
        self._latest.move_to_end(key)
        while len(self._latest) > NUM_KEPT:
            self._latest.popitem(last=False)
        if self._tracer is not None:
            from orchestrator.observability.spans import export  # needs the extra `traces`

            export(self._tracer, trace, request)

    async def close(self) -> None:
        """Send the pending spans, for a few seconds at most."""
        if self._provider is not None:
            await asyncio.to_thread(self._provider.shutdown)
