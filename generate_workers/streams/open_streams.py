"""Streams as their readers see them: a log of events that outlives a lost call, and may be taken over by another.

Last step of a request's way (DESIGN.md, sections 4 and 6). The engine writes, one call reads. When the call is lost, as
it is when the orchestrator dies, the stream runs on for `keep_s` seconds, so that the next orchestrator finds it; when
the orchestrator gives a request up, it says so (`cancel`), and the stream ends at once. On the loop.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from baton.errors import NotFoundError
from baton.ids import RequestId, StreamNumber
from baton.types import FinishReason, TokenEvent
from generate_workers.engine.core import GenerationEngine
from generate_workers.engine.rows import GenerationRequest, Ticket
from modeling.prefix_store.store import Filled


@dataclass(eq=False)
class OpenStream:
    """One stream: what it has said so far."""

    request: GenerationRequest
    number: StreamNumber
    """Of the latest orchestrator's claim to it."""
    keep_s: float
    ticket: Ticket = field(init=False)
    events: list[TokenEvent] = field(default_factory=list)
    num_open: int = 0
    """Choices that have not ended."""
    filled: Filled | None = None
    """What was stored of the answers; the last that the engine says, where they are to be."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    expiry: asyncio.TimerHandle | None = None
    """Ends the stream; running while nobody reads."""

    def append(self, event: TokenEvent) -> None:
        """The engine's next event."""
        self.events.append(event)
        self.num_open -= event.finish is not None
        self.changed.set()

    def fill(self, filled: Filled) -> None:
        """The engine's last word."""
        self.filled = filled
        self.changed.set()

    @property
    def is_over(self) -> bool:
        """Whether the engine has nothing more to say."""
        return not self.num_open and (self.filled is not None or self.request.naming is None)

    def is_about(self, request: GenerationRequest, outputs: Sequence[Sequence[int]]) -> bool:
        """Whether it is this request's, and the choices' outputs began like that."""
        own = self.request
        if (own.request_id, own.prompt_ids, own.params) != (request.request_id, request.prompt_ids, request.params):
            return False
        known = [list(own.output_ids) for _ in range(own.params.n)]
        for event in self.events:
            if event.token is not None:
                known[event.choice].append(event.token.token_id)
        pairs = zip(known, outputs, strict=False)
        return len(outputs) == len(known) and all(ids[: len(output)] == list(output) for ids, output in pairs)

    async def follow(self, num_done: Sequence[int]) -> AsyncGenerator[TokenEvent, None]:
        """All events after the first `num_done` tokens of each choice, to the last; returns when all is over."""
        position = 0
        while position < len(self.events) or not self.is_over:
            if position == len(self.events):
                self.changed.clear()
                await self.changed.wait()
                continue
            event = self.events[position]
            position += 1
            if event.token is None or event.index >= num_done[event.choice]:
                yield event
            elif event.finish is not None:  # the token is known, perhaps not that it was the last
                yield replace(event, index=event.index + 1, token=None, text="", prompt=())


class OpenStreams:
    """All streams of one engine, by number."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._streams: set[OpenStream] = set()
        self._delivered: deque[tuple[OpenStream, TokenEvent | Filled]] = deque()
        """On their way from the engine's thread to the loop."""
        self._wake_due = False

    def open(self, request: GenerationRequest, number: StreamNumber, keep_s: float) -> OpenStream:
        """Submits a request to the engine, and raises what that raises."""
        stream = OpenStream(request, number, keep_s, num_open=request.params.n)
        deliver = partial(self._deliver, stream)
        stream.ticket = self._engine.submit(request, deliver, deliver)
        self._streams.add(stream)
        return stream

    def take_over(
        self, request: GenerationRequest, number: StreamNumber, outputs: Sequence[Sequence[int]]
    ) -> OpenStream:
        """The request's stream that nobody reads, and whose outputs began with `outputs`. Raises NotFoundError when
        there is none."""
        for stream in self._streams:
            if stream.expiry is not None and stream.is_about(request, outputs):
                stream.expiry.cancel()
                stream.expiry, stream.number = None, number
                return stream
        raise NotFoundError(f"request {request.request_id} has no stream here that could be taken over")

    async def read(self, stream: OpenStream, num_done: Sequence[int]) -> AsyncGenerator[TokenEvent, None]:
        """The stream's events after the first `num_done` tokens of each choice; by one reader at a time. Once its last
        event is read, it is forgotten; when the reader leaves earlier, it is kept or ended."""
        try:
            async for event in stream.follow(num_done):
                yield event
        except BaseException:
            self._lose(stream)
            raise
        self._forget(stream)

    def cancel(self, number: StreamNumber) -> None:
        """Ends the stream of that number, if there is one."""
        for stream in [each for each in self._streams if each.number == number]:
            self._end(stream)

    def kept(self) -> list[tuple[RequestId, int]]:
        """`(request, slots held)` of the streams that nobody reads."""
        kept = [each for each in self._streams if each.expiry is not None]
        return [(each.request.request_id, each.num_open + self._engine.num_saving(each.ticket)) for each in kept]

    def close(self) -> None:
        """Stops all timers; the engine ends the streams."""
        for stream in self._streams:
            if stream.expiry is not None:
                stream.expiry.cancel()

    def _deliver(self, stream: OpenStream, event: TokenEvent | Filled) -> None:
        """On the engine's thread: a step's events share a wake-up of the loop, which takes a system call."""
        self._delivered.append((stream, event))
        if not self._wake_due:
            self._wake_due = True
            self._loop.call_soon_threadsafe(self._take_delivered)

    def _take_delivered(self) -> None:
        self._wake_due = False  # before it looks: what comes later wakes again
        while self._delivered:
            stream, event = self._delivered.popleft()
            if isinstance(event, Filled):
                stream.fill(event)
            else:
                stream.append(event)

    def _lose(self, stream: OpenStream) -> None:
        """Nobody reads any more."""
        has_run = any(event.finish is not FinishReason.ERROR for event in stream.events)
        if stream in self._streams and stream.keep_s and has_run and stream.num_open:
            stream.expiry = self._loop.call_later(stream.keep_s, self._end, stream)
        else:
            self._end(stream)

    def _end(self, stream: OpenStream) -> None:
        self._forget(stream)
        self._engine.cancel(stream.ticket)

    def _forget(self, stream: OpenStream) -> None:
        if stream.expiry is not None:
            stream.expiry.cancel()
            stream.expiry = None
        self._streams.discard(stream)
