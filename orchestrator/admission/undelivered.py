"""Bounds the memory of events that clients have not taken yet, over all streams of an orchestrator.

Made and used by `orchestrator.scheduler`. A request runs as fast as its engine does, however slowly its client reads:
its events wait in an `Outbox`. When all outboxes together exceed `MAX_UNDELIVERED_BYTES`, the tenant with most bytes
for its weight gives up the stream that was read least recently. That stream ends with RESOURCE_EXHAUSTED. Its client
may resume it after the tokens that it has. `orchestrator.api.delivery` ends the calls of clients that never read.
On the loop.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from baton.errors import ResourceExhaustedError
from baton.limits import MAX_UNDELIVERED_BYTES
from orchestrator.requests.record import Event, Finished, Started
from orchestrator.requests.tenants import Tenant

logger = logging.getLogger(__name__)

_EVENT_BYTES = 420
_SCORE_BYTES = 160


class Outbox:
    """Events of one request that its client has not taken, in order. Made by `Outboxes.open`; `close` it in the end."""

    def __init__(self, count: "Callable[[Outbox, int], None]", end: Callable[[], object]) -> None:
        """`count` is called with the change of the outbox's bytes, after each change and at each reading. `end` is
        called when the stream is given up: it ends the request."""
        self.num_bytes = 0
        """Bytes that the events in it take in memory."""
        self.refusal: ResourceExhaustedError | None = None
        """Error with which the stream was given up; None while it was not."""
        self._count = count
        self._end = end
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._is_closed = False

    def put(self, event: Event) -> None:
        """Add an event. Of a stream that was given up, only the last event is kept, with the error."""
        if self.refusal is not None:
            if isinstance(event, Finished):
                self._events.put_nowait(replace(event, error=event.error or self.refusal))
        elif not self._is_closed:
            self._events.put_nowait(event)
            self._add_bytes(_size_of(event))

    async def take(self) -> Event:
        """Wait for the next event and return it. For one task at a time."""
        event = await self._events.get()
        if self.refusal is None:
            self._add_bytes(-_size_of(event))
        return event

    def give_up(self, refusal: ResourceExhaustedError) -> None:
        """Drop all events but the last one, which carries the error from now on, and end the request."""
        events, self._events = self._events, asyncio.Queue()
        self.refusal = refusal
        self._add_bytes(-self.num_bytes)
        while not events.empty():
            self.put(events.get_nowait())
        self._end()

    def close(self) -> None:
        """Drop all events, after the client has left. Idempotent."""
        self._is_closed = True
        self._add_bytes(-self.num_bytes)

    def _add_bytes(self, change: int) -> None:
        self.num_bytes += change
        self._count(self, change)


@dataclass
class _Share:
    """Undelivered events of one tenant."""

    weight: float
    num_bytes: int = 0
    outboxes: OrderedDict[Outbox, None] = field(default_factory=OrderedDict)
    """Outboxes that are not empty, the one that was read least recently first."""


class Outboxes:
    """All outboxes of an orchestrator."""

    def __init__(self, max_bytes: int = MAX_UNDELIVERED_BYTES) -> None:
        self.num_bytes = 0
        """Bytes that the events in all outboxes take in memory."""
        self._max_bytes = max_bytes
        self._shares: dict[str, _Share] = {}
        """Undelivered events by tenant; tenants without any are absent."""

    def open(self, tenant: Tenant, end: Callable[[], object]) -> Outbox:
        """Return an empty outbox for a request of the tenant. `end` ends the request, when its stream is given up."""

        def count(outbox: Outbox, change: int) -> None:
            self._count(tenant, outbox, change)

        return Outbox(count, end)

    def _count(self, tenant: Tenant, outbox: Outbox, change: int) -> None:
        share = self._shares.get(tenant.name)
        if share is None:
            share = self._shares[tenant.name] = _Share(tenant.weight)
        self.num_bytes += change
        share.num_bytes += change
        if not outbox.num_bytes:
            share.outboxes.pop(outbox, None)
            if not share.outboxes:
                del self._shares[tenant.name]
        elif change > 0:
            share.outboxes.setdefault(outbox)
            while self.num_bytes > self._max_bytes:
                self._give_up_one()
        else:
            share.outboxes.move_to_end(outbox)

    def _give_up_one(self) -> None:
        name, share = max(self._shares.items(), key=lambda each: each[1].num_bytes / each[1].weight)
        outbox = next(iter(share.outboxes))
        logger.warning("gave up a stream of tenant %s that is not read: %d bytes wait", name, outbox.num_bytes)
        outbox.give_up(
            ResourceExhaustedError(
                f"{self.num_bytes} bytes of tokens wait for their readers, over the limit of {self._max_bytes}, and "
                f"this stream was read least recently of tenant {name}'s: resume it, and read faster"
            )
        )


def _size_of(event: Event) -> int:
    """Return about how many bytes an event takes in memory."""
    if isinstance(event, Started | Finished):
        return _EVENT_BYTES
    num_scores = len(event.prompt) + sum(len(each.top) for each in event.prompt)
    num_scores += 0 if event.token is None else len(event.token.top)
    return _EVENT_BYTES + len(event.text) + _SCORE_BYTES * num_scores
