"""Reads an attempt's stream, beside the chain that prefills for it (steps 8 and 9 of a request's way). On the loop."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack

from baton.errors import StalePrefixError, UnavailableError
from baton.results import RankTiming
from baton.types import FinishReason, TokenEvent
from orchestrator.placement.prefix_index import PrefixIndex
from orchestrator.requests.record import RequestRecord
from orchestrator.workers.client import EventStream

Emit = Callable[[TokenEvent], None]
"""Where an attempt's events go."""
Chain = asyncio.Task[tuple[RankTiming, ...]]
"""One attempt's prefill, on all ranks."""

_CLOSE_S = 1.0
"""For a stream to close after its last event, before its request ends."""
_STORING_S = 10.0
"""For it to close at all: its answers are being stored."""
_DOUBT_S = 0.2
"""How much later than a chain that could not push the dead group's stream may fail."""
_ENDED_BY_WORKER = (FinishReason.ERROR, FinishReason.CANCELLED)


async def first_event(stream: EventStream, chain: Chain) -> TokenEvent:
    """The stream's first event. A chain that fails before it ends the wait with its error, unless the stream fails as
    well: then the chain had nowhere to push to. One that never began is in no such doubt."""
    reading = asyncio.create_task(stream.read())
    try:
        await asyncio.wait({reading, chain}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done() and (failure := failure_of(chain)) is not None:
            if not isinstance(failure, StalePrefixError):
                await asyncio.wait({reading}, timeout=_DOUBT_S)
            if not reading.done():
                raise failure
        return await reading
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def follow(record: RequestRecord, stream: EventStream, event: TokenEvent, emit: Emit) -> None:
    """From this event of the stream to the last of its last choice; the stream's own end is yet to come."""
    while True:
        if event.finish in _ENDED_BY_WORKER:
            raise UnavailableError(f"the generation group gave the request up: {event.error or event.finish.value}")
        accepted = record.accept(event)
        if accepted is not None:
            emit(accepted)
        if record.is_complete:
            return
        event = await stream.read()


class Closings:
    """Streams that have brought all their tokens, until they say what was stored of their answers."""

    def __init__(self, prefixes: PrefixIndex) -> None:
        self._prefixes = prefixes
        self._tasks: set[asyncio.Task[None]] = set()

    async def add(self, stream: EventStream, store: str, held: ExitStack) -> None:
        """Hears the stream to its end, then closes `held`, whether or not the caller is cancelled. Returns when that is
        done, or after a moment: a prompt that goes on at once should find what was stored."""
        task = asyncio.create_task(self._hear(stream, store, held))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.wait({task}, timeout=_CLOSE_S)

    async def close(self) -> None:
        """Gives those that are left another moment."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=_CLOSE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _hear(self, stream: EventStream, store: str, held: ExitStack) -> None:
        with held:
            try:
                await stream.closed(_STORING_S)
            finally:
                stream.cancel()
                self._prefixes.forget(store, stream.evicted)
                self._prefixes.use(store, stream.stored)


def failure_of(chain: Chain) -> BaseException | None:
    """What it failed with; None while it runs, and when it was cancelled."""
    return chain.exception() if chain.done() and not chain.cancelled() else None
