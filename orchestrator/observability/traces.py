"""Stores the traces of the requests that ended most recently, for `baton trace`, and exports spans to an OpenTelemetry
collector.

A request becomes one span with a child span for each stage, including the stages of prefill ranks. If the caller sent a
`traceparent` (W3C trace context), the span belongs to the caller's trace. Workers export nothing: they send their
measurements with their answers. So the orchestrator exports each request once, after its end. A thread of
OpenTelemetry's SDK sends batches of spans. A batch that the collector does not accept in time is dropped and logged.

Called by `orchestrator.observability.journal` on the event loop.
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
"""Maximum number of ended requests whose traces are stored."""


class Traces:
    """Stores the traces of the requests that ended most recently in one orchestrator. Exports them as spans if an
    exporter is configured."""

    def __init__(self, provider: "TracerProvider | None" = None) -> None:
        """Create an empty store. `provider` creates the spans, and is shut down by `close`. If it is None, nothing is
        exported."""
        self._provider = provider
        self._tracer: Tracer | None = None if provider is None else provider.get_tracer("baton", __version__)
        self._latest: OrderedDict[tuple[str, str], Trace] = OrderedDict()
        """Stored traces by tenant and request id. Clients choose request ids, so two tenants may use the same id."""

    def get(self, request_id: str) -> Trace | None:
        """Return the stored trace of the request with this id; None if no trace is stored. If several tenants used the
        same id, return the trace of the request that ended first."""
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
        """Send the pending spans, and wait for a few seconds at most."""
        if self._provider is not None:
            await asyncio.to_thread(self._provider.shutdown)
