"""Reads an attempt's stream of tokens, and monitors the prefill until the first token arrives.

Used by `orchestrator.dispatch.attempt`. Events come from `orchestrator.workers.client`. Runs on the event loop.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from baton.errors import StalePrefixError, UnavailableError
from baton.types import FinishReason, TokenEvent, TokenOrigin
from orchestrator.dispatch.prefilling import PrefillTask, failure_of
from orchestrator.placement.prefix_index import PrefixIndex
from orchestrator.requests.record import RequestRecord
from orchestrator.workers.client import AttemptEvents

Emit = Callable[[TokenEvent], None]
"""Function to which an attempt passes each of its token events."""

_CLOSE_S = 1.0
"""Maximum seconds to wait for a stream to close after it has delivered all tokens of its request."""
_STORING_S = 10.0
"""Maximum seconds to keep reading a stream after it has delivered all tokens, while the group stores the KV of the
answers."""
_DOUBT_S = 0.2
"""Seconds to wait, after a prefill has failed, for the stream to fail too. If the generation group has died, the
prefill's push of KV may fail before the stream does."""
_ENDED_BY_WORKER = (FinishReason.ERROR, FinishReason.CANCELLED)


async def first_event(stream: AttemptEvents, prefill: PrefillTask | None) -> TokenEvent:
    """Return the stream's first event. `prefill` is the task of the prefill for this stream; None if there is no
    prefill.

    If the prefill fails before the first event, its error is raised. If the stream also fails within `_DOUBT_S`
    seconds, the stream's error is raised instead, because the loss of the leased slot then made the prefill fail. A
    StalePrefixError of the prefill is raised without waiting for the stream, because the prefill never began.
    """
    if prefill is None:
        return await stream.read()
    reading = asyncio.create_task(stream.read())
    try:
        await asyncio.wait({reading, prefill}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done() and (failure := failure_of(prefill)) is not None:
            if not isinstance(failure, StalePrefixError):
                await asyncio.wait({reading}, timeout=_DOUBT_S)
            if not reading.done():
                raise failure
        return await reading
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


def with_origins(emit: Emit, generation: str, prefill: str = "", predicted_step_s: float = 0.0) -> Emit:
    """Return a function that passes events to `emit` and adds the names of the groups that produced the tokens.

    The first token of each choice comes from the last rank of the chain in the group `prefill` (empty if there is no
    chain). All other tokens come from the group `generation`. Names are added to the first token of each choice. If
    there is a chain, they are also added to the second token, which is the first from the group `generation`.
    `predicted_step_s` is added together with the names.
    """
    own = TokenOrigin(generation, predicted_step_s=predicted_step_s)
    origins = (replace(own, prefill=prefill), own) if prefill else (own,)
    num_sent: Counter[int] = Counter()  # number of origins sent, by choice

    def emit_with_origin(event: TokenEvent) -> None:
        number = num_sent[event.choice]
        if number < len(origins) and event.token is not None:
            num_sent[event.choice] += 1
            event = replace(event, origin=origins[number])
        emit(event)

    return emit_with_origin


async def follow(record: RequestRecord, stream: AttemptEvents, event: TokenEvent, emit: Emit) -> None:
    """Record `event` and all later events of the stream, and pass them to `emit`, until all choices have ended. Does
    not wait until the stream is closed. Raises UnavailableError if the generation group gives up the request."""
    while True:
        if event.finish in _ENDED_BY_WORKER:
            raise UnavailableError(f"the generation group gave the request up: {event.error or event.finish.value}")
        accepted = record.accept(event)
        if accepted is not None:
            emit(accepted)
        if record.is_complete:
            return
        event = await stream.read()


class StreamDrainer:
    """Continues to read each stream after its last token, until the generation group has reported which KV blocks of
    the answers it has stored."""

    def __init__(self, prefixes: PrefixIndex) -> None:
        self._prefixes = prefixes
        self._tasks: set[asyncio.Task[None]] = set()

    async def add(self, stream: AttemptEvents, store: str, held: ExitStack) -> None:
        """Start a task that reads the stream to its end and then closes `held`. The task continues even if the caller
        is cancelled. `store` is the name of the group's prefix store, whose entries in the prefix index are updated.

        This call waits until the stream has ended, for at most `_CLOSE_S` seconds. Meanwhile the group can store the
        blocks of the answer. A prompt that continues the answer then finds them in the cache.
        """
        task = asyncio.create_task(self._hear(stream, store, held))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.wait({task}, timeout=_CLOSE_S)

    async def close(self) -> None:
        """Wait for at most `_CLOSE_S` seconds for the remaining streams, then cancel them."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=_CLOSE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _hear(self, stream: AttemptEvents, store: str, held: ExitStack) -> None:
        with held:
            try:
                await stream.closed(_STORING_S)
            finally:
                stream.cancel()
                self._prefixes.forget(store, stream.evicted)
                self._prefixes.use(store, stream.stored)
