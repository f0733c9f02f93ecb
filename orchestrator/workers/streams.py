"""Multiplexes all streams of one generation group over one gRPC call, which stays open while any stream is open.

Used by `orchestrator.workers.client`. Each stream has its own queue of events, so a slow reader does not delay other
streams. The queue is bounded by the request's number of tokens. If the call breaks, all its streams fail, as they would
with separate calls. The next stream then opens a new call. Runs on the event loop.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import grpc

from baton.errors import BatonError, InvalidArgumentError, UnavailableError
from baton.limits import MAX_MESSAGE_BYTES
from baton.proto_types import columns_from_proto, event_from_proto
from baton.rpc_status import error_of_name, from_rpc_error
from baton.transport.status_interceptor import FAILED_WRITE, SentStatus
from baton.types import TokenEvent
from baton.v1 import generate_pb2 as pb
from baton.v1.generate_pb2_grpc import GenerationGroupStub

if TYPE_CHECKING:
    from baton.v1.generate_pb2_grpc import GenerationGroupAsyncStub

    StreamsCall = grpc.aio.StreamStreamCall[pb.StreamCommand, pb.StreamEvents]

logger = logging.getLogger(__name__)

MAX_COMMAND_BYTES = MAX_MESSAGE_BYTES - 2**16
"""Maximum size in bytes of a message about one request. A larger message would exceed gRPC's limit, which would end the
call and all its streams."""


class StreamPart:
    """Single stream of a shared gRPC call. It is read as if it had a call of its own."""

    def __init__(self, number: int, leave: Callable[[int], None]) -> None:
        """Create the stream with this number. `leave` is called with the number if the reader cancels the stream before
        its end."""
        self.number = number
        self._leave = leave
        self._events: deque[TokenEvent | pb.StoredBlocks] = deque()
        self._ended = False
        self._error: BatonError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def read(self) -> TokenEvent | pb.StoredBlocks | None:
        """Return the next event, or the report of stored blocks, which may follow the last event; None at the end.
        Raises the stream's error. Only one task may read at a time."""
        while not self._events:
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._events.popleft()

    def cancel(self) -> None:
        """Stop reading this stream, and notify the group. Idempotent; does nothing after the end of the stream."""
        if not self._ended:
            self._leave(self.number)
            self.end(UnavailableError(f"stream {self.number} was left by its reader"))

    def take_token(self, event: TokenEvent) -> None:
        """Accept a token of this stream that was received in columns."""
        self._events.append(event)
        self._wake()

    def take(self, event: pb.StreamEvent) -> None:
        """Accept a received message of this stream: an event for the reader, the end of the stream, or both."""
        if event.HasField("event"):
            has_blocks = event.event.HasField("stored")
            try:
                self._events.append(event.event.stored if has_blocks else event_from_proto(event.event))
            except BatonError as error:
                self._leave(self.number)
                self.end(error)
                return
        if event.HasField("end"):
            end = event.end
            self.end(error_of_name(end.error, end.text, end.retry_after_s or None) if end.error else None)
        else:
            self._wake()

    def end(self, error: BatonError | None) -> None:
        """Mark the end of the stream. `error` is raised to the reader; None: the stream ended normally. No event may
        follow."""
        self._ended, self._error = True, error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _SharedCall:
    """gRPC call that is shared by several streams. It is opened for the first stream and ends with the last one."""

    def __init__(self, stub: "GenerationGroupAsyncStub", on_end: "Callable[[_SharedCall], None]") -> None:
        self.parts: dict[int, StreamPart] = {}
        self.is_over = False
        self._commands: asyncio.Queue[pb.StreamCommand | None] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read(stub))
        self._reading.add_done_callback(lambda _: on_end(self))

    def open(self, number: int, command: pb.StreamCommand) -> StreamPart:
        part = self.parts[number] = StreamPart(number, self.leave)
        self._commands.put_nowait(command)
        return part

    def leave(self, number: int) -> None:
        self._commands.put_nowait(pb.StreamCommand(leave=number))
        self._forget(number)

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    def _forget(self, number: int) -> None:
        if self.parts.pop(number, None) is not None and not self.parts:
            self.is_over = True
            self._commands.put_nowait(None)

    async def _sent(self) -> AsyncIterator[pb.StreamCommand]:
        while (command := await self._commands.get()) is not None:
            yield command

    async def _read(self, stub: "GenerationGroupAsyncStub") -> None:
        """Pass incoming messages to their streams until the call ends. Then fail every open stream."""
        failure: BatonError = UnavailableError("the call that the stream shares with others has ended")
        call = None
        try:
            call = stub.Streams(self._sent())
            failure = await self._hand_out(call) or failure
        except Exception as error:
            logger.exception("the call that streams share failed")
            failure = UnavailableError(f"the call that the stream shares with others failed: {error!r}")
        finally:
            self.is_over = True
            if call is not None:
                call.cancel()
            self._commands.put_nowait(None)  # grpc waits for the end of commands, even after the call's end
            for reader in self.parts.values():
                reader.end(type(failure)(str(failure)))  # a separate error for each reader to raise
            self.parts.clear()

    def _take_tokens(self, message: pb.TokenColumns) -> None:
        """Pass tokens to their streams. If the message cannot be read, end the streams that have tokens in it."""
        try:
            for number, token in columns_from_proto(message):
                if (reader := self.parts.get(number)) is not None:
                    reader.take_token(token)
        except BatonError as error:
            for number in set(message.numbers) & self.parts.keys():
                self.parts[number].end(error)
                self.leave(number)

    async def _hand_out(self, call: "StreamsCall") -> BatonError | None:
        """Pass incoming messages to their streams until the call ends. Return the error that ended the call, or
        None."""
        sent = SentStatus(call)
        try:
            while isinstance(message := await call.read(), pb.StreamEvents):
                self._take_tokens(message.tokens)
                for event in message.events:
                    if (reader := self.parts.get(event.number)) is not None:
                        reader.take(event)
                        if event.HasField("end") and event.end.error:
                            self._forget(event.number)
                        elif event.HasField("end"):
                            self.leave(event.number)  # the group then stops keeping it for a takeover
        except grpc.aio.AioRpcError as error:
            status = sent.of(error)
            if status.code() is not grpc.StatusCode.OK and status.details() != FAILED_WRITE:
                return from_rpc_error(status)
        return None


class SharedStreams:
    """Opens the streams of one generation group. Owned by the client that owns the channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub: GenerationGroupAsyncStub = GenerationGroupStub(channel)
        self._calls: set[_SharedCall] = set()
        self._latest: _SharedCall | None = None

    def open(self, request: pb.StreamRequest) -> StreamPart:
        """Open the stream with the number in `request`, or take over a stream that the group has kept. Failures are
        raised when the stream is read.

        If the request is too large for a message, reading the stream raises InvalidArgumentError. The request is then
        not sent, so other streams of the same call are not affected.
        """
        command = pb.StreamCommand(open=request)
        try:
            check_size(request.request_id, command.ByteSize())
        except InvalidArgumentError as error:
            refused = StreamPart(request.number, lambda number: None)
            refused.end(error)
            return refused
        if self._latest is None or self._latest.is_over:
            self._latest = _SharedCall(self._stub, self._calls.discard)
            self._calls.add(self._latest)
        return self._latest.open(request.number, command)

    async def close(self) -> None:
        """End all calls. Call it when no stream is being read, before the channel is closed."""
        await asyncio.gather(*(call.close() for call in self._calls))


def check_size(request_id: str, num_bytes: int) -> None:
    """Check that a message about a request is small enough for workers. Raises InvalidArgumentError if `num_bytes`
    exceeds the maximum."""
    if num_bytes > MAX_COMMAND_BYTES:
        raise InvalidArgumentError(
            f"request {request_id} takes {num_bytes} bytes between the orchestrator and its workers, over the limit "
            f"of {MAX_COMMAND_BYTES}: send a shorter prompt, or fewer outputs"
        )
