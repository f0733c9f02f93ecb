"""Streams of a request's tokens, for threads and for asyncio. `baton.client` creates them. `baton.calls.resume` decides
when a stream is resumed."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Generic, Protocol, Self, TypeVar

import grpc

from baton.calls.resume import StreamState
from baton.errors import BatonError, RequestCancelledError
from baton.process.endless import is_task_cancelled
from baton.results.completion import Completion, Usage
from baton.results.timings import Timings
from baton.rpc_status import translate_rpc_errors
from baton.types import FinishReason, TokenEvent
from baton.v1 import orchestrator_pb2


class Call(Protocol):
    """Synchronous gRPC call that is running."""

    def __next__(self) -> orchestrator_pb2.GenerateEvent: ...
    def cancel(self) -> object: ...


AsyncCall = grpc.aio.UnaryStreamCall[orchestrator_pb2.GenerateRequest, orchestrator_pb2.GenerateEvent]
CallT = TypeVar("CallT", Call, AsyncCall)


class BaseStream(Generic[CallT]):
    """Base class of Stream and AsyncStream. It provides the output, token usage and timings of the request, which are
    complete once the stream has ended."""

    _cancelled: threading.Event | asyncio.Event

    def __init__(self, state: StreamState, open_call: Callable[[StreamState], CallT]) -> None:
        """Create a stream and open its first call. `open_call` sends the next request of `state`, and returns the call
        without blocking."""
        self._state = state
        self._open_call: Callable[[StreamState], CallT] = open_call
        self._call: CallT = open_call(state)

    @property
    def output(self) -> Completion:
        """All output that has been received so far."""
        return self._state.output()

    @property
    def request_id(self) -> str:
        """Id of the request. The server's logs use the same id."""
        return self._state.request_id

    @property
    def finish(self) -> FinishReason | None:
        """Finish reason of the stream's first choice. None while the choice is running."""
        return self._state.finish

    @property
    def usage(self) -> Usage | None:
        """Numbers of prompt tokens, output tokens and attempts of the request. None until the server's last message has
        arrived."""
        return self._state.usage

    @property
    def timings(self) -> Timings | None:
        """Times at which the stages of the request began and ended. None until the server's last message has
        arrived."""
        return self._state.timings

    def cancel(self) -> None:
        """Cancel the request on the client and on the server. Does not block. Has no effect if the stream has ended or
        was cancelled before."""
        self._give_up(" by its client")

    def _give_up(self, why: str) -> None:
        self._state.fail(RequestCancelledError(f"request {self.request_id} was cancelled{why}"))
        self._cancelled.set()
        self._call.cancel()


class Stream(BaseStream[Call]):
    """Stream of a running request. Iterate over it once, in one thread. Any thread may call `cancel`.

    The stream yields a TokenEvent for each token as soon as it is generated. The last event of a choice sets `finish`.
    It contains all text that was withheld until then, such as a possible start of a stop string. This event may have no
    token.

    If the connection to the server is lost, the stream waits, reconnects and continues where it stopped: no token is
    repeated or missing. Iterating raises the BatonError that ended the request: DeadlineExceededError after the
    deadline, RequestCancelledError after `cancel`, UnavailableError if the server cannot be reached again. `output`
    still contains the tokens that were received before the error.

    If the stream is used as a context manager, leaving the block cancels a request that is still running.
    """

    _cancelled: threading.Event

    def __init__(self, state: StreamState, open_call: Callable[[StreamState], Call]) -> None:
        super().__init__(state, open_call)
        self._lock = threading.Lock()  # guards against `cancel` while a new call is being opened
        self._cancelled = threading.Event()

    def __iter__(self) -> Iterator[TokenEvent]:
        return self

    def __next__(self) -> TokenEvent:
        """Block until the next event, and return it."""
        while not self._state.is_over:
            if (event := self._read()) is not None:
                return event
        self._call.cancel()  # the stream does not use this call any more
        self._state.raise_failure()
        raise StopIteration

    def collect(self) -> Completion:
        """Block until the stream ends and return the whole output. The output includes events over which the caller has
        already iterated."""
        for _ in self:
            pass
        return self.output

    def text(self) -> str:
        """Block until the stream ends and return the text of the first choice."""
        return self.collect().text

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.cancel()

    def _give_up(self, why: str) -> None:
        with self._lock:
            super()._give_up(why)

    def _read(self) -> TokenEvent | None:
        try:
            with translate_rpc_errors():
                message = next(self._call, None)
            return self._state.accept(message)
        except BatonError as error:
            delay_s = self._state.call_failed(error)
        if delay_s is not None:
            self._cancelled.wait(delay_s)
            with self._lock:
                if not self._cancelled.is_set():
                    self._call.cancel()
                    self._call = self._open_call(self._state)
        return None


class AsyncStream(BaseStream[AsyncCall]):
    """Stream of a running request, for asyncio. It behaves like Stream. Use it on the event loop on which it was
    created, and iterate over it in one task only.

    If a task is cancelled while it waits for an event, the request is cancelled as well.
    """

    _cancelled: asyncio.Event

    def __init__(self, state: StreamState, open_call: Callable[[StreamState], AsyncCall]) -> None:
        super().__init__(state, open_call)
        self._cancelled = asyncio.Event()

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        return self

    async def __anext__(self) -> TokenEvent:
        """Wait for the next event, and return it."""
        while not self._state.is_over:
            if (event := await self._read()) is not None:
                return event
        self._call.cancel()  # the stream does not use this call any more
        self._state.raise_failure()
        raise StopAsyncIteration

    async def collect(self) -> Completion:
        """Wait until the stream ends and return the whole output. The output includes events over which the caller has
        already iterated."""
        async for _ in self:
            pass
        return self.output

    async def text(self) -> str:
        """Wait until the stream ends and return the text of the first choice."""
        return (await self.collect()).text

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.cancel()

    async def _read(self) -> TokenEvent | None:
        try:
            with translate_rpc_errors():
                message = await self._call.read()
            return self._state.accept(message if isinstance(message, orchestrator_pb2.GenerateEvent) else None)
        except BatonError as error:
            delay_s = self._state.call_failed(error)
        except asyncio.CancelledError:
            if is_task_cancelled():
                self.cancel()
                raise
            client_closed(self)  # has no effect if `cancel` was called before
            return None
        if delay_s is not None and not await self._cancelled_within(delay_s):
            self._call.cancel()
            self._call = self._open_call(self._state)
        return None

    async def _cancelled_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._cancelled.wait(), seconds)
        except TimeoutError:
            return False
        return True


def client_closed(stream: BaseStream[Any]) -> None:
    """Cancel a stream because its client is closing the connection."""
    stream._give_up(": its client was closed")
