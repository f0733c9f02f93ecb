"""Open streams as logs of events, which are kept when a call is lost and can be taken over by another call.

`engine.core` writes the events, and the SharedReader of one call reads them (`shared_reader`). When the call is lost,
for example because the orchestrator dies, the stream is kept for `keep_s` seconds, so that the next orchestrator can
take it over. This includes an ended stream, unless its reader has confirmed the end. When the orchestrator abandons a
request, it sends `Cancel`, and the stream ends at once. Runs on the asyncio loop.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from baton.errors import NotFoundError
from baton.modeling.prefix_store.store import Filled
from baton.prefix_blocks import BlockNaming
from baton.types import FinishReason, RequestId, StreamNumber, TokenEvent
from generate_workers.engine.core import GenerationEngine
from generate_workers.engine.rows import GenerationRequest, StreamId
from generate_workers.prefixes.answer_saving import AnswerSaver, StreamAnswers


@dataclass(eq=False)
class OpenStream:
    """Open stream: its request and the events that it has emitted so far."""

    request: GenerationRequest
    number: StreamNumber
    """Number of the stream, assigned by the orchestrator that opened it or took it over last."""
    keep_s: float
    on_message: Callable[[], None]
    """Function that is called after each new message. It is set by the call that reads the stream, or that read it
    last."""
    stream_id: StreamId = field(init=False)
    events: list[TokenEvent] = field(default_factory=list)
    num_open: int = 0
    """Number of choices that have not ended."""
    answers: StreamAnswers | None = None
    """The stream's answers, if they are to be stored; else None."""
    filled: Filled | None = None
    """Stored blocks of the answers, which are the stream's last message. None until they are stored, and if no answers
    are to be stored."""
    expiry: asyncio.TimerHandle | None = None
    """Timer that ends the stream. It runs while no call reads the stream."""
    _num_known: Sequence[int] = ()
    """Number of tokens of each choice that the reader already had when it began to read."""
    _num_read: int = 0
    """Number of events that the reader has received or already had."""

    def take(self, message: TokenEvent | Filled) -> None:
        """Add the next event to the log, or record the stored blocks of the answers."""
        if isinstance(message, Filled):
            self.filled = message
        else:
            self.events.append(message)
            self.num_open -= message.finish is not None
        self.on_message()

    @property
    def is_over(self) -> bool:
        """Return whether this stream will have no more messages."""
        return not self.num_open and (self.filled is not None or self.answers is None)

    @property
    def num_slots(self) -> int:
        """Return the number of slots that the stream holds or will hold: one for each choice that has not ended, and
        for each answer that is not stored yet."""
        return self.num_open + (self.answers.num_held if self.answers is not None else 0)

    def is_about(self, request: GenerationRequest, outputs: Sequence[Sequence[int]]) -> bool:
        """Return whether this stream serves `request`, and each choice's output begins with its item of `outputs`."""
        own = self.request
        if (own.request_id, own.prompt_ids, own.params) != (request.request_id, request.prompt_ids, request.params):
            return False
        known = [list(own.output_ids) for _ in range(own.params.n)]
        for event in self.events:
            if event.token is not None:
                known[event.choice].append(event.token.token_id)
        pairs = zip(known, outputs, strict=False)
        return len(outputs) == len(known) and all(ids[: len(output)] == list(output) for ids, output in pairs)

    def rewind(self, num_known: Sequence[int]) -> None:
        """Restart the log for a reader that already has the first `num_known` tokens of each choice."""
        self._num_known, self._num_read = num_known, 0

    def unread(self) -> Iterator[TokenEvent | Filled]:
        """Yield the messages that the reader has not received: events in order, and at the end the stored blocks."""
        while self._num_read < len(self.events):
            event = self.events[self._num_read]
            self._num_read += 1
            if event.token is None or event.index >= self._num_known[event.choice]:
                yield event
            elif event.finish is not None:  # the reader has this token, but perhaps not the finish reason
                yield replace(event, index=event.index + 1, token=None, text="", prompt=())
        if self.is_over and self.filled is not None:
            yield self.filled


class OpenStreams:
    """All open streams of one engine. Used on the asyncio loop on which it is created."""

    def __init__(self, engine: GenerationEngine, saver: AnswerSaver | None = None) -> None:
        """`saver` stores answers. None: they are not stored."""
        self._engine = engine
        self._saver = saver
        self._loop = asyncio.get_running_loop()
        self._streams: set[OpenStream] = set()
        self._delivered: deque[tuple[OpenStream, TokenEvent | Filled]] = deque()
        """Messages from other threads that the loop has not processed yet."""
        self._wake_due = False

    def open(
        self,
        request: GenerationRequest,
        number: StreamNumber,
        keep_s: float,
        on_message: Callable[[], None],
        naming: BlockNaming | None = None,
    ) -> OpenStream:
        """Submit a request to the engine and open its stream. `on_message`: called on the loop after each new message,
        even after the reader has left the stream. It must neither block nor raise. `naming`: names of the blocks of its
        answers, if these are to be stored. Raises the errors of `GenerationEngine.submit`."""
        stream = OpenStream(request, number, keep_s, on_message, num_open=request.params.n)
        stream.rewind([0] * request.params.n)
        deliver = partial(self._deliver, stream)
        if naming is not None and self._saver is not None:
            stream.answers = StreamAnswers(self._saver, naming, deliver)
        stream.stream_id = self._engine.submit(request, deliver, stream.answers)
        self._streams.add(stream)
        return stream

    def take_over(
        self,
        request: GenerationRequest,
        number: StreamNumber,
        outputs: Sequence[Sequence[int]],
        on_message: Callable[[], None],
    ) -> OpenStream:
        """Return the stream of the request that no call reads and whose outputs begin with `outputs`, and set its
        number to `number`. `on_message`: see `open`. Raises NotFoundError if no such stream exists."""
        for stream in self._streams:
            if stream.expiry is not None and stream.is_about(request, outputs):
                stream.expiry.cancel()
                stream.expiry, stream.number, stream.on_message = None, number, on_message
                stream.rewind([len(output) for output in outputs])
                return stream
        raise NotFoundError(f"request {request.request_id} has no stream here that could be taken over")

    def cancel(self, number: StreamNumber) -> None:
        """End the stream with this number, if it exists."""
        for stream in [each for each in self._streams if each.number == number]:
            self.end(stream)

    def end(self, stream: OpenStream) -> None:
        """Remove a stream, end it in the engine, and drop its answers that are not stored yet. Idempotent."""
        self.forget(stream)
        self._engine.cancel(stream.stream_id)
        if stream.answers is not None:
            stream.answers.cancel()

    def lose(self, stream: OpenStream) -> None:
        """Handle the loss of a stream's reader. Keep the stream for `keep_s` seconds if it has emitted an event other
        than an error; otherwise end it."""
        has_run = any(event.finish is not FinishReason.ERROR for event in stream.events)
        if stream in self._streams and stream.keep_s and has_run:
            stream.expiry = self._loop.call_later(stream.keep_s, self.end, stream)
        else:
            self.end(stream)

    def forget(self, stream: OpenStream) -> None:
        """Drop a stream whose reader has confirmed its end. Idempotent."""
        if stream.expiry is not None:
            stream.expiry.cancel()
            stream.expiry = None
        self._streams.discard(stream)

    def kept(self) -> list[tuple[RequestId, int]]:
        """Return `(request, number of slots held)` of each stream that no call reads."""
        return [(each.request.request_id, each.num_slots) for each in self._streams if each.expiry is not None]

    def close(self) -> None:
        """Stop all timers. The engine ends the streams."""
        for stream in list(self._streams):
            self.forget(stream)

    def _deliver(self, stream: OpenStream, message: TokenEvent | Filled) -> None:
        """Pass a message to the loop. Any thread. All events of a step wake the loop only once, because each wake-up is
        a system call."""
        self._delivered.append((stream, message))
        if not self._wake_due:
            self._wake_due = True
            self._loop.call_soon_threadsafe(self._take_delivered)

    def _take_delivered(self) -> None:
        self._wake_due = False  # cleared before the queue is read, so that a later event wakes the loop again
        while self._delivered:
            stream, message = self._delivered.popleft()
            stream.take(message)
