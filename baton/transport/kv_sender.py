"""Sends KV to a slot of a generation group. A push is the transfer of all pieces of KV to one slot. The engine's thread
offers the pieces. The event loop sends them one at a time on a route, which is a gRPC stream or shared memory
(`baton.transport.kv_routes`).

Used by `prefill_workers.servicer`. The receiver is `baton.transport.kv_receiver` in a generation group. The engine's
thread calls only the methods of PushSession that are marked as thread-safe. All other code runs on the process's
asyncio loop.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc
import xxhash

from baton.errors import ByteCountError, RequestCancelledError
from baton.process.clock import Clock, SteadyTime, SystemClock
from baton.proto_types import range_to_proto
from baton.transport.kv_routes import MAX_PIECE_BYTES, Route, SharedRoute, StreamRoute
from baton.transport.proto_types import lease_ref_to_proto
from baton.transport.shared_memory import CellPool
from baton.types import KvLayout, Lease, LeaseRef, TokenRange
from baton.v1 import kv_pb2

logger = logging.getLogger(__name__)

OpenRoute = Callable[[Callable[[], None]], Awaitable[Route]]
"""Function that opens the route of a push. Its argument is a callback that the route calls when the receiver ends the
push."""


@dataclass(frozen=True)
class PushSummary:
    """Counts and times of a push that has finished successfully."""

    num_bytes: int
    """Number of payload bytes that were sent. The receiver has counted the same number; duplicates are included."""
    num_pieces: int
    first_unix_ns: int
    """Time of the first call of `PushSession.offer`, in unix nanoseconds."""
    last_unix_ns: int
    """Time at which the receiver's acknowledgement of the last piece arrived, in unix nanoseconds."""
    num_duplicates: int = 0
    """Number of pieces that the receiver had already received before."""
    num_bytes_shared: int = 0
    """Number of payload bytes that were sent through shared memory. It is either 0 or equal to `num_bytes`."""


def open_push(
    channel: grpc.aio.Channel,
    layout: KvLayout,
    lease: Lease,
    *,
    clock: Clock | None = None,
    pool: CellPool | None = None,
) -> "PushSession":
    """Start a push to the slot of `lease`. The caller ends it with `finish`, `fail` or `cancel` of the returned
    session. Must be called on the asyncio loop.

    Pieces are sent through shared memory of `pool` if it is given and the receiver is a process of the same user on the
    same node. Otherwise they are sent over gRPC.
    """

    async def open_route(on_end: Callable[[], None]) -> Route:
        shared = await SharedRoute.open(channel, pool, on_end) if pool is not None else None
        return shared or StreamRoute(channel, on_end)

    return PushSession(open_route, lease.ref, layout, clock or SystemClock())


class PushSession:
    """Push of KV pieces to the slot of one lease.

    The memory of an offered piece is read when the piece is sent, and must not change until the session has ended.
    Pieces are sent on a route (a gRPC stream or shared memory). Sending waits if the route holds too much copied data
    that the receiver has not taken yet. The asyncio loop owns all state except `_offers`, `_finished`, `_wake_due` and
    `_first_unix_ns`, which other threads change too. Each of these changes is atomic.
    """

    def __init__(self, open_route: OpenRoute, ref: LeaseRef, layout: KvLayout, clock: Clock) -> None:
        self._ref = ref
        self._layout = layout
        self._time = SteadyTime(clock)
        self._loop = asyncio.get_running_loop()
        self._offers: deque[tuple[int, TokenRange, memoryview]] = deque()
        self._wake = asyncio.Event()
        self._wake_due = False
        self._finished = False
        self._ended = False
        self._failure: BaseException | None = None
        self._first_unix_ns: int | None = None
        self._num_bytes = 0
        self._num_pieces = 0
        self._result: asyncio.Future[PushSummary] = self._loop.create_future()
        self._result.add_done_callback(lambda result: result.exception())  # else asyncio logs an unread failure
        self._task = self._loop.create_task(self._run(open_route))

    def offer(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        """Queue a piece for sending: the KV of `tokens` in `layer`. Never blocks, and copies nothing. Thread-safe.

        `data` must be contiguous and must not change until the session has ended. If the session has already ended, the
        piece is dropped, and `result` raises the reason.
        """
        assert data.nbytes == len(tokens) * self._layout.row_bytes, f"{data.nbytes} bytes for {tokens}"
        assert not self._finished or self._ended, "offer after finish"
        if self._ended:
            return
        if self._first_unix_ns is None:
            self._first_unix_ns = self._time.unix_ns()
        self._offers.append((layer, tokens, data))
        self._wake_up()

    def finish(self) -> None:
        """End the push when all pieces that were offered so far have been sent. No more pieces may be offered.
        Thread-safe; idempotent."""
        self._finished = True
        self._wake_up()

    def fail(self, error: BaseException) -> None:
        """End the push immediately with an error, which `result` then raises. Does nothing if the push has already
        ended. Thread-safe."""
        self._on_loop(lambda: self._stop(error))

    def cancel(self) -> None:
        """Cancel the push immediately. `result` then raises RequestCancelledError. Does nothing if the push has already
        ended. Thread-safe."""
        self.fail(RequestCancelledError(f"the push to slot {self._ref.slot} was cancelled"))

    async def result(self) -> PushSummary:
        """Wait until the receiver has acknowledged all pieces. Return the counts and times of the push.

        Raises the receiver's error, or the error with which the session was ended. If the wait is cancelled, the
        session continues. May be called again.
        """
        return await asyncio.shield(self._result)

    def _wake_up(self) -> None:
        # One wake-up serves many offers: the loop clears `_wake_due` before it reads the offers, never after.
        if not self._wake_due:
            self._wake_due = True
            self._on_loop(self._wake.set)

    def _on_loop(self, function: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            if not self._loop.is_closed():  # with a closed loop the session has ended too
                raise

    def _stop(self, error: BaseException) -> None:
        if not self._ended and self._failure is None:
            self._failure = error
            self._task.cancel()

    async def _run(self, open_route: OpenRoute) -> None:
        """Run the push to its end in the session's task. Then close the route and drop all offered memory."""
        route: Route | None = None
        try:
            route = await open_route(self._wake.set)
            self._result.set_result(await self._push(route))
        except asyncio.CancelledError:
            # Not re-raised: the task ends here, and asyncio would keep the traceback.
            stopped = RequestCancelledError(f"the push to slot {self._ref.slot} ended with its process's loop")
            self._result.set_exception(self._failure or stopped)
        except Exception as error:  # noqa: BLE001 - `result` raises it
            self._result.set_exception(_without_frames(error))
        finally:
            self._ended = True
            self._offers.clear()
            if route is not None:
                route.close()

    async def _push(self, route: Route) -> PushSummary:
        try:
            await self._send_offers(route)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as ended:
            logger.debug("the receiver ended a push: %s", ended)  # the call's status, read below, has the reason
        reply = await route.reply()
        if reply is None:
            raise self._miscount("fewer, and ended the push")
        if (reply.num_bytes, reply.num_pieces) != (self._num_bytes, self._num_pieces) or not self._finished:
            raise self._miscount(f"{reply.num_pieces} of {reply.num_bytes}")
        now_ns = self._time.unix_ns()
        return PushSummary(
            self._num_bytes,
            self._num_pieces,
            first_unix_ns=now_ns if self._first_unix_ns is None else self._first_unix_ns,
            last_unix_ns=now_ns,
            num_duplicates=reply.num_duplicates,
            num_bytes_shared=self._num_bytes if route.is_shared else 0,
        )

    def _miscount(self, answer: str) -> ByteCountError:
        return ByteCountError(
            f"slot {self._ref.slot}: sent {self._num_pieces} pieces of {self._num_bytes} bytes, but the receiver "
            f"counted {answer}: push again"
        )

    async def _send_offers(self, route: Route) -> None:
        while not route.ended:
            self._wake.clear()
            self._wake_due = False
            finished = self._finished  # read first, so that the offers include all made before `finish`
            while self._offers:
                await self._send(route, *self._offers.popleft())
            if finished:
                await route.finish()
                return
            await route.flush()
            await self._wake.wait()

    async def _send(self, route: Route, layer: int, tokens: TokenRange, data: memoryview) -> None:
        row_bytes = self._layout.row_bytes
        rows = data.cast("B")
        for part in tokens.split(max(MAX_PIECE_BYTES // row_bytes, 1)):
            payload = rows[(part.start - tokens.start) * row_bytes : (part.end - tokens.start) * row_bytes]
            await route.send(self._header(layer, part, payload), payload)
            self._num_bytes += payload.nbytes
            self._num_pieces += 1

    def _header(self, layer: int, tokens: TokenRange, payload: memoryview) -> kv_pb2.KvPieceHeader:
        return kv_pb2.KvPieceHeader(
            lease=lease_ref_to_proto(self._ref),
            layout_fingerprint=self._layout.fingerprint,
            layer=layer,
            tokens=range_to_proto(tokens),
            checksum=xxhash.xxh3_64_intdigest(payload),
        )


def _without_frames(error: BaseException) -> BaseException:
    """Return the error without its traceback and those of its causes: their frames would keep offered memory alive."""
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
    return error
