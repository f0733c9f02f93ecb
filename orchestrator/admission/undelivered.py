"""Limits the memory of events that clients have not read yet, over all streams of an orchestrator.

Made and used by `orchestrator.scheduler`. A request runs at full speed even if its client reads slowly. Its events wait
in an `Outbox`. If all outboxes together exceed `MAX_UNDELIVERED_BYTES`, streams are ended one at a time until the limit
is kept. Each time, the tenant with the most bytes relative to its weight is selected, and of its streams the one that
was read least recently. The stream ends with RESOURCE_EXHAUSTED. Its client may resume it after the last token that the
client has received. `orchestrator.api.delivery` ends the calls of clients that stop reading. Runs on the asyncio loop.
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
    """Events of one request that its client has not read yet, in order. Made by `Outboxes.open`. `close` must be called
    at the end."""

    def __init__(self, count: "Callable[[Outbox, int], None]", end: Callable[[], object]) -> None:
        """`count`: function that is called with this outbox and the change of its number of bytes, whenever an event is
        added or removed. `end`: function that ends the request. It is called by `give_up`."""
        self.num_bytes = 0
        """Number of bytes of memory that the stored events use."""
        self.refusal: ResourceExhaustedError | None = None
        """Error with which `give_up` has ended the stream; None if `give_up` was not called."""
        self._count = count
        self._end = end
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._is_closed = False

    def put(self, event: Event) -> None:
        """Add an event. After `give_up`, events are dropped, except the stream's last event (Finished). It is stored
        with the error that was passed to `give_up`, unless it has an error already."""
        if self.refusal is not None:
            if isinstance(event, Finished):
                self._events.put_nowait(replace(event, error=event.error or self.refusal))
        elif not self._is_closed:
            self._events.put_nowait(event)
            self._add_bytes(_size_of(event))

    async def take(self) -> Event:
        """Wait for the next event and return it. Only one task may call this at a time."""
        event = await self._events.get()
        if self.refusal is None:
            self._add_bytes(-_size_of(event))
        return event

    def give_up(self, refusal: ResourceExhaustedError) -> None:
        """End the stream with the error `refusal`, and end its request. Unread events are dropped. If the stream's last
        event (Finished) is one of them, it is kept, with `refusal` as its error if it has none yet."""
        events, self._events = self._events, asyncio.Queue()
        self.refusal = refusal
        self._add_bytes(-self.num_bytes)
        while not events.empty():
            self.put(events.get_nowait())
        self._end()

    def close(self) -> None:
        """Ignore events that are added from now on, and no longer count the memory of stored events. Must be called
        when the client has disconnected or has read all events. Idempotent."""
        self._is_closed = True
        self._add_bytes(-self.num_bytes)

    def _add_bytes(self, change: int) -> None:
        self.num_bytes += change
        self._count(self, change)


@dataclass
class _Share:
    """Unread events of one tenant, over all of its requests."""

    weight: float
    num_bytes: int = 0
    outboxes: OrderedDict[Outbox, None] = field(default_factory=OrderedDict)
    """Outboxes that are not empty. The outbox that was read least recently is the first."""


class Outboxes:
    """Unread events of all requests of an orchestrator, with a limit on their memory."""

    def __init__(self, max_bytes: int = MAX_UNDELIVERED_BYTES) -> None:
        self.num_bytes = 0
        """Number of bytes of memory that the events in all outboxes use."""
        self._max_bytes = max_bytes
        self._shares: dict[str, _Share] = {}
        """Unread events of each tenant, by the tenant's name. Tenants without unread events have no entry."""

    def open(self, tenant: Tenant, end: Callable[[], object]) -> Outbox:
        """Return an empty outbox for a request of `tenant`. `end`: function that ends the request. It is called if this
        request's stream is ended to free memory."""

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
    """Return the approximate number of bytes of memory that an event uses."""
    if isinstance(event, Started | Finished):
        return _EVENT_BYTES
    num_scores = len(event.prompt) + sum(len(each.top) for each in event.prompt)
    num_scores += 0 if event.token is None else len(event.token.top)
    return _EVENT_BYTES + len(event.text) + _SCORE_BYTES * num_scores
