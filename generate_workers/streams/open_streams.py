"""Open streams of an engine. A stream is a log of events. It is kept when its call is lost, and can be taken over by
another call.

`engine.core` writes the events, and the SharedReader of one call reads them (`shared_reader`). A call may be lost
because the orchestrator dies, for example. Its streams are then kept for `keep_s` seconds, so that the next
orchestrator can take them over. An ended stream is kept as well, unless its reader has confirmed the end. When the
orchestrator abandons a request, it sends `Cancel`, and the stream ends at once. Runs on the asyncio loop.
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
    """Open stream: a request, and the log of the events that it has emitted so far."""

    request: GenerationRequest
    number: StreamNumber
    """Number of the stream. It is assigned by the orchestrator that has opened the stream, or that took it over
    last."""
    keep_s: float
    on_message: Callable[[], None]
    """Function that is called after each new message. It belongs to the call that opened the stream, or that took it
    over last."""
    stream_id: StreamId = field(init=False)
    events: list[TokenEvent] = field(default_factory=list)
    num_open: int = 0
    """Number of choices that have not ended."""
    answers: StreamAnswers | None = None
    """Collects the answers of the stream that are to be stored in the prefix store; None if no answers are stored."""
    filled: Filled | None = None
    """Last message of the stream: the result of storing the KV blocks of its answers in the prefix store. None until
    the answers are stored. Always None if no answers are to be stored."""
    expiry: asyncio.TimerHandle | None = None
    """Timer that ends the stream. It runs only while no call reads the stream. None: the timer does not run."""
    _num_known: Sequence[int] = ()
    """Number of tokens of each choice that the present reader already had when it took over the stream."""
    _num_read: int = 0
    """Number of events, from the start of the log, that the present reader does not need any more. They were passed to
    this reader before, or the reader had them when it took over the stream."""

    def take(self, message: TokenEvent | Filled) -> None:
        """Add an event to the log or, if the message is a `Filled` (the result of storing the answers in the prefix
        store), set `filled`. In both cases, call `on_message` afterwards."""
        if isinstance(message, Filled):
            self.filled = message
        else:
            self.events.append(message)
            self.num_open -= message.finish is not None
        self.on_message()

    @property
    def is_over(self) -> bool:
        """Return True if no further message will be added to this stream."""
        return not self.num_open and (self.filled is not None or self.answers is None)

    @property
    def num_slots(self) -> int:
        """Return the number of slots that the stream uses or will use: one for each choice that has not ended, and one
        for each answer that is not stored yet."""
        return self.num_open + (self.answers.num_held if self.answers is not None else 0)

    def is_about(self, request: GenerationRequest, outputs: Sequence[Sequence[int]]) -> bool:
        """Return True if this stream serves `request`, and the output of each choice begins with the corresponding item
        of `outputs`."""
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
        """Read the log from its start again, for a new reader. `num_known`: number of tokens of each choice that the
        reader already has. They are not sent again."""
        self._num_known, self._num_read = num_known, 0

    def unread(self) -> Iterator[TokenEvent | Filled]:
        """Yield the messages that the present reader has not received: the events in order, and finally the message
        `filled` (the result of storing the answers in the prefix store), if there is one."""
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
        """`saver`: stores the streams' answers in the prefix store. None: answers are not stored."""
        self._engine = engine
        self._saver = saver
        self._loop = asyncio.get_running_loop()
        self._streams: set[OpenStream] = set()
        self._delivered: deque[tuple[OpenStream, TokenEvent | Filled]] = deque()
        """Messages, each with its stream, that other threads have delivered and that the loop has not processed yet."""
        self._wake_due = False

    def open(
        self,
        request: GenerationRequest,
        number: StreamNumber,
        keep_s: float,
        on_message: Callable[[], None],
        naming: BlockNaming | None = None,
    ) -> OpenStream:
        """Submit a request to the engine, and return its new stream. `keep_s`: seconds for which the stream is kept
        when its reader is lost. `on_message`: function that is called on the event loop after each new message, even
        after the reader has left the stream. It must neither block nor raise. `naming`: rule that names the KV blocks
        of the answers. None: the answers are not stored in the prefix cache. Raises the errors of
        `GenerationEngine.submit`."""
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
        """Let a new call read a stream whose call was lost, and return the stream. The stream must be of the same
        request, and its outputs must begin with `outputs`, the tokens of each choice that the caller already has. The
        stream's number changes to `number`. `on_message`: function that is called on the loop after each new message.
        Raises NotFoundError if no such stream exists."""
        for stream in self._streams:
            if stream.expiry is not None and stream.is_about(request, outputs):
                stream.expiry.cancel()
                stream.expiry, stream.number, stream.on_message = None, number, on_message
                stream.rewind([len(output) for output in outputs])
                return stream
        raise NotFoundError(f"request {request.request_id} has no stream here that could be taken over")

    def cancel(self, number: StreamNumber) -> None:
        """End the stream with this number. Does nothing if no such stream exists."""
        for stream in [each for each in self._streams if each.number == number]:
            self.end(stream)

    def end(self, stream: OpenStream) -> None:
        """Remove a stream, end it in the engine, and drop its answers that are not stored yet. Idempotent."""
        self.forget(stream)
        self._engine.cancel(stream.stream_id)
        if stream.answers is not None:
            stream.answers.cancel()

    def lose(self, stream: OpenStream) -> None:
        """Handle the loss of a stream's reader. If `keep_s` is not 0, and the log has an event that is not an error,
        keep the stream for `keep_s` seconds. Otherwise end the stream."""
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
        """Return `(request, number of slots)` for each stream that no call reads. The slots are those that the stream
        uses or will use."""
        return [(each.request.request_id, each.num_slots) for each in self._streams if each.expiry is not None]

    def close(self) -> None:
        """Stop all timers. The streams themselves are ended by the engine."""
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
