"""Delivery of many streams on one gRPC call. Whenever the call can send, all unread messages of its streams are sent as
one batch.

`servicer` makes and owns one reader for each Streams call, on the asyncio loop. All sequences of a step get their
tokens at the same time. One message per step costs the client less than one message per token. Events wait only in the
logs of their streams (`open_streams`), so a slow call gets larger batches. When the call is lost, all its streams lose
their reader. This includes streams whose end was sent, because the client may not have read it.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Generic, TypeVar

from baton.errors import BatonError, InvalidArgumentError
from baton.modeling.prefix_store.store import Filled
from baton.types import StreamNumber, TokenEvent
from generate_workers.streams.open_streams import OpenStream, OpenStreams

T = TypeVar("T")

logger = logging.getLogger(__name__)


class SharedReader(Generic[T]):
    """Reader of all streams that one gRPC call delivers."""

    def __init__(
        self,
        streams: OpenStreams,
        encode: Callable[[StreamNumber, TokenEvent | Filled], T],
        encode_end: Callable[[StreamNumber, BatonError | None], T],
    ) -> None:
        """`encode`: function that returns the message for an event of a stream. If it raises, the stream ends with this
        error. `encode_end`: function that returns the message for the end of a stream, with the error if the stream
        failed, else None."""
        self._streams = streams
        self._encode = encode
        self._encode_end = encode_end
        self._reading: dict[StreamNumber, OpenStream] = {}
        self._ready: dict[StreamNumber, None] = {}
        """Numbers of the streams whose logs may have unread messages, in the order of the arrival of these messages."""
        self._sent: dict[StreamNumber, OpenStream] = {}
        """Streams whose end was sent to the client, and has not been confirmed by the client yet."""
        self._refused: list[T] = []
        self._changed = asyncio.Event()
        self._is_complete = False
        self._error: BatonError | None = None
        """Error with which the call ends; None: no error."""

    def add(self, number: StreamNumber, open_stream: Callable[[Callable[[], None]], OpenStream]) -> None:
        """Open a stream and read it until it ends, the client leaves it, or the call is lost. `open_stream`: function
        that opens the stream; its argument is the `on_message` function of the stream. If `number` is in use or
        `open_stream` raises, the client gets the error as the stream's end."""
        try:
            if self._error is not None:
                raise self._error
            if number in self._reading or number in self._sent:
                raise InvalidArgumentError(f"number {number} is taken: use another number")
            self._reading[number] = open_stream(partial(self._note, number))
        except Exception as failure:  # noqa: BLE001 - logged where it is a bug
            self._refused.append(self._encode_end(number, _known(number, failure)))
            self._changed.set()
            return
        self._note(number)

    def leave(self, number: StreamNumber) -> None:
        """Stop reading the stream with this number, because the client has left it. If its end was already sent, the
        client thereby confirms the end, and the stream is dropped. Idempotent."""
        if number in self._sent:
            self._streams.forget(self._sent.pop(number))
        elif number in self._reading:
            stream = self._drop(number)
            if stream.num_open:
                self._streams.lose(stream)
            else:
                self._streams.end(stream)
            self._changed.set()

    def complete(self) -> None:
        """Record that no further stream will be added."""
        self._is_complete = True
        self._changed.set()

    async def batches(self) -> AsyncGenerator[list[T], None]:
        """Yield lists of messages of all streams. Each list has the messages that arrived after the previous list was
        made. The iterator ends when `complete` was called and all streams have ended, or with the error of
        `break_off`."""
        while self._error is None and (self._reading or self._refused or not self._is_complete):
            if batch := self._read():
                yield batch
            else:
                self._changed.clear()
                await self._changed.wait()
        if self._error is not None:
            raise self._error

    def break_off(self, error: BatonError) -> None:
        """End the call with an error, and report its loss. No further stream can be added."""
        self._error = error
        self.close()
        self._changed.set()

    def close(self) -> None:
        """Report the loss of the call to `OpenStreams.lose`, for all streams that the client has not left.
        Idempotent."""
        for number in list(self._reading):
            self._streams.lose(self._drop(number))
        while self._sent:
            self._streams.lose(self._sent.popitem()[1])

    def _note(self, number: StreamNumber) -> None:
        if number in self._reading:
            self._ready[number] = None
            self._changed.set()

    def _read(self) -> list[T]:
        batch, self._refused = self._refused, []
        ready, self._ready = self._ready, {}
        for number in ready:
            self._read_stream(number, batch)
        return batch

    def _read_stream(self, number: StreamNumber, batch: list[T]) -> None:
        """Add the unread messages of a stream's log to the batch, and the stream's end if it is over."""
        stream, error = self._reading[number], None
        try:
            batch.extend(self._encode(number, event) for event in stream.unread())
            if not stream.is_over:
                return
            self._sent[number] = stream
        except Exception as failure:  # noqa: BLE001 - logged where it is a bug
            error = _known(number, failure)
            self._streams.end(stream)
        self._drop(number)
        batch.append(self._encode_end(number, error))

    def _drop(self, number: StreamNumber) -> OpenStream:
        self._ready.pop(number, None)
        return self._reading.pop(number)


def _known(number: StreamNumber, failure: Exception) -> BatonError:
    """Return the error to send to a stream's client: the failure itself or, if the failure is a bug, an error that
    refers to the log."""
    if isinstance(failure, BatonError):
        return failure.with_traceback(None)  # the error outlives the objects that its frames hold
    logger.error("stream %d failed", number, exc_info=failure)
    return BatonError(f"stream {number} failed in the generation group: its log has the traceback")
