"""Keeps the latest requests that have ended, for `baton trace`, and sends their spans to an OpenTelemetry collector.

A request becomes one span, in the trace of the caller if it sent a `traceparent` (W3C trace context), and one span
below it for each stage, ranks' parts included. Workers send nothing: what they measured came with their answers, so
that one process exports, once for each request, after its end. A thread of OpenTelemetry's SDK sends batches. A batch
that a collector does not take in time is dropped and logged. Called by `orchestrator.observability.journal` on the
loop.
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
        """Keep the trace of a request that has ended, and export its spans."""
        key = request.tenant.name, trace.request_id
        self._latest[key] = trace
        self._latest.move_to_end(key)
        while len(self._latest) > NUM_KEPT:
            self._latest.popitem(last=False)
        if self._tracer is not None:
            from orchestrator.observability.spans import export  # needs the extra `traces`

            export(self._tracer, trace, request)

    async def close(self) -> None:
        """Send the spans that wait, for some seconds at most."""
        if self._provider is not None:
            await asyncio.to_thread(self._provider.shutdown)
