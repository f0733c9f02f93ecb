"""Two routes on which a push sends its pieces of KV: a gRPC stream that contains the bytes, or shared memory if the
receiver is on the same node.

`baton.transport.kv_sender` opens one route for each push and sends pieces on it. `baton.transport.kv_receiver` receives
them. Both routes use one gRPC call, whose status is the result of the push. Used on the asyncio loop.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Protocol, Self

import grpc

from baton.errors import ByteCountError
from baton.transport.kv_frame import Piece, encode_piece
from baton.transport.kv_receiver import SERVICE
from baton.transport.shared_memory import CellPool, SharedCells, Turns
from baton.transport.status_interceptor import SentStatus, from_rpc_error
from baton.types import KvLayout
from baton.v1 import kv_pb2

MAX_PIECE_BYTES = 2**20
"""Maximum payload of one piece in bytes. A piece always has at least one token, even if it is larger than this.

Larger pieces have less overhead. Smaller pieces occupy the event loop for a shorter time when they are checked and
copied, so other calls wait less.
"""
NUM_CELLS = 16
"""Number of cells (units of shared memory) of one push. It limits the push's shared memory to about the amount of data
that gRPC allows in flight in a stream."""
CELLS_PER_ANSWER = NUM_CELLS // 2
"""Number of full cells (units of shared memory) after which the sender requests an acknowledgement. While the receiver
reads these cells, the sender fills the other half. Acknowledgements are not requested more often, because each
message and each answer takes longer than copying a small piece."""
MAX_PIECES = 64
"""Maximum number of pieces in a message."""
_ALIGNED = 64
"""Alignment in bytes of payloads in shared memory. It is the size of a CPU cache line."""

_StreamCall = grpc.aio.StreamUnaryCall[Piece, kv_pb2.PushReply]
_SharedCall = grpc.aio.StreamStreamCall[kv_pb2.SharedPieces, kv_pb2.SharedAnswer]


class Route(Protocol):
    """Route on which one push sends its pieces to the receiver. After the push's gRPC call has ended, `send`, `flush`
    and `finish` raise AioRpcError or InvalidStateError, and `reply` raises the receiver's error."""

    is_shared: bool
    """True if payloads are sent through shared memory. False if they are sent over gRPC."""

    @property
    def ended(self) -> bool:
        """Return True if the receiver has ended the push. No more pieces can be sent then."""
        ...

    async def send(self, header: kv_pb2.KvPieceHeader, payload: memoryview) -> None:
        """Send a piece, either immediately or together with later pieces in one message. The payload is copied. Waits
        if the receiver is slower than the sender."""
        ...

    async def flush(self) -> None:
        """Send all pieces that have been collected for the next message."""
        ...

    async def finish(self) -> None:
        """Send all pieces that have not been sent yet, and notify the receiver that no more pieces follow."""
        ...

    async def reply(self) -> kv_pb2.PushReply | None:
        """Return the receiver's counts of pieces and bytes when the call has ended. Return None if the call ended
        without an error and without counts. Raises the receiver's error."""
        ...

    def close(self) -> None:
        """End the call if it is still running, and release all memory."""
        ...


class StreamRoute:
    """Route that sends pieces as messages of a gRPC stream. gRPC's flow control limits the data that is encoded and not
    yet sent."""

    is_shared = False

    def __init__(self, channel: grpc.aio.Channel, on_end: Callable[[], None]) -> None:
        push: grpc.aio.StreamUnaryMultiCallable[Piece, kv_pb2.PushReply] = channel.stream_unary(
            f"/{SERVICE}/Push", lambda piece: encode_piece(*piece), kv_pb2.PushReply.FromString
        )
        self._call: _StreamCall = push()
        self._call.add_done_callback(lambda _: on_end())
        self._status = SentStatus(self._call)

    @property
    def ended(self) -> bool:
        """Return True if the call has ended."""
        return self._call.done()

    async def send(self, header: kv_pb2.KvPieceHeader, payload: memoryview) -> None:
        """Send a piece. Waits while gRPC's flow control does not accept more data."""
        await self._call.write((header, payload))

    async def flush(self) -> None:
        """Do nothing, because `send` has already sent every piece."""

    async def finish(self) -> None:
        """Send the end of the stream of pieces."""
        await self._call.done_writing()

    async def reply(self) -> kv_pb2.PushReply | None:
        """Wait until the call has ended, and return the receiver's counts of pieces and bytes. Return None if the call
        failed on this side although the receiver ended it without an error. Raises the receiver's error."""
        try:
            return await self._call
        except grpc.aio.AioRpcError as error:
            _raise_unless_ok(self._status.of(error), error)
            return None

    def close(self) -> None:
        """End the call if it is still running."""
        self._call.cancel()


def make_pool(layout: KvLayout) -> CellPool:
    """Return an empty pool of shared memory for pushes of this layout."""
    return CellPool(NUM_CELLS, max(MAX_PIECE_BYTES, layout.row_bytes))


class SharedRoute:
    """Route that copies pieces into cells of shared memory, and sends messages with the location of each piece. Create
    it with `open`.

    A cell is a unit of shared memory that holds several pieces. A cell is reused when the receiver has acknowledged all
    of its pieces. If all cells are in use, the sender waits for the receiver. A cell in use is in one of three states:
    being filled (`_cell`), full (`_full`), or waiting for an acknowledgement that the sender has requested (`_asked`).
    If all cells are in use, at least one requested acknowledgement has not arrived yet.
    """

    is_shared = True

    def __init__(
        self, call: _SharedCall, status: SentStatus, pool: CellPool, cells: SharedCells, on_end: Callable[[], None]
    ) -> None:
        """Take ownership of a call whose receiver has already mapped the shared memory `cells`, which was taken from
        `pool`. `on_end` is called when the receiver ends the push."""
        self._call = call
        self._status = status
        self._pool = pool
        self._cells = cells
        self._on_end = on_end
        self._cell: int | None = None
        """Offset in shared memory of the cell that is being filled. None if no cell is being filled."""
        self._num_used = 0
        """Number of bytes already used in the cell that is being filled."""
        self._full: list[int] = []
        """Offsets in shared memory of the full cells for which no acknowledgement has been requested yet."""
        self._filled: list[kv_pb2.SharedPiece] = []
        """Pieces that will be sent in the next message."""
        self._num_unasked = 0
        """Number of pieces that were sent after the last message that requested an acknowledgement."""
        self._asked: deque[tuple[int, list[int]]] = deque()
        """Acknowledgements that were requested and have not arrived. Each is (number of pieces that it acknowledges,
        offsets in shared memory of the cells that it frees)."""
        self._answered = asyncio.Event()
        self._turns = Turns()
        self._total: kv_pb2.PushReply | None = None
        self._reading = asyncio.get_running_loop().create_task(self._read())
        self._reading.add_done_callback(_retrieve)

    @classmethod
    async def open(cls, channel: grpc.aio.Channel, pool: CellPool, on_end: Callable[[], None]) -> Self | None:
        """Open the call, and let the receiver map shared memory of the pool. Return None if the pool cannot allocate
        memory or the receiver cannot map it. Raises the receiver's error. `on_end` is called when the receiver ends the
        push."""
        cells = pool.take()
        if cells is None:
            return None
        push: grpc.aio.StreamStreamMultiCallable[kv_pb2.SharedPieces, kv_pb2.SharedAnswer] = channel.stream_stream(
            f"/{SERVICE}/PushShared", kv_pb2.SharedPieces.SerializeToString, kv_pb2.SharedAnswer.FromString
        )
        with contextlib.ExitStack() as undo:
            undo.callback(cells.close)
            call: _SharedCall = push()
            undo.callback(call.cancel)
            status = SentStatus(call)
            if not await _is_mapped(call, status, cells.name):
                return None
            undo.pop_all()
        return cls(call, status, pool, cells, on_end)

    @property
    def ended(self) -> bool:
        """Return True if the receiver's last answer has been read."""
        return self._reading.done()

    async def send(self, header: kv_pb2.KvPieceHeader, payload: memoryview) -> None:
        """Copy the payload into shared memory. If enough pieces have been copied since the last message, send a message
        with their locations. Waits while all cells (units of the shared memory) are in use."""
        offset = await self._place(payload.nbytes)
        self._cells.write(offset, payload)
        self._filled.append(kv_pb2.SharedPiece(header=header, offset=offset, num_bytes=payload.nbytes))
        if not self._has_room(payload.nbytes):  # the next piece is likely to be as large
            self._close_cell()
        if len(self._full) >= CELLS_PER_ANSWER or len(self._filled) >= MAX_PIECES:
            await self.flush()
        else:
            await self._turns.take(payload.nbytes)

    async def flush(self) -> None:
        """Send a message with the locations of the pieces that were copied into shared memory after the last message.
        Does nothing if there are none."""
        if not self._filled:
            return
        message = kv_pb2.SharedPieces(pieces=self._filled, answer=len(self._full) >= CELLS_PER_ANSWER)
        self._num_unasked += len(self._filled)
        self._filled = []
        if message.answer:
            self._asked.append((self._num_unasked, self._full))
            self._num_unasked, self._full = 0, []
        await self._call.write(message)

    async def finish(self) -> None:
        """Send the last message with pieces, and then the end of the stream of messages."""
        await self.flush()
        await self._call.done_writing()

    async def reply(self) -> kv_pb2.PushReply | None:
        """Wait until the call has ended, and return the receiver's counts of pieces and bytes. Return None if the call
        ended without an error and without counts. Raises the receiver's error."""
        try:
            await self._reading
        except grpc.aio.AioRpcError as error:
            _raise_unless_ok(self._status.of(error), error)
        return self._total

    def close(self) -> None:
        """End the call, and return the shared memory to the pool. The pool reuses the memory for a later push when the
        receiver no longer reads it."""
        self._call.cancel()
        self._reading.cancel()
        if self._total is not None:
            self._pool.give_back(self._cells)
        else:
            self._cells.close()

    async def _place(self, num_bytes: int) -> int:
        """Return the offset in shared memory at which a payload of this size can be written. Waits while all cells
        (units of the shared memory) are in use."""
        self._require_open()
        if self._cell is not None and not self._has_room(num_bytes):
            self._close_cell()
        if self._cell is None:
            self._cell, self._num_used = await self._take_cell(), 0
        offset = self._cell + self._num_used
        self._num_used += -(-num_bytes // _ALIGNED) * _ALIGNED
        return offset

    async def _take_cell(self) -> int:
        while (cell := self._cells.take()) is None:
            self._answered.clear()
            await self._answered.wait()
            self._require_open()
        return cell

    def _has_room(self, num_bytes: int) -> bool:
        return self._num_used + num_bytes <= self._cells.cell_bytes

    def _close_cell(self) -> None:
        assert self._cell is not None
        self._full.append(self._cell)
        self._cell = None

    def _require_open(self) -> None:
        if self.ended:
            raise asyncio.InvalidStateError("the receiver has ended the push")

    async def _read(self) -> None:
        """Read the receiver's answers until the call ends. Each answer frees the cells whose pieces it acknowledges."""
        try:
            while isinstance(answer := await self._call.read(), kv_pb2.SharedAnswer):
                if answer.HasField("total"):
                    self._total = answer.total
                    continue
                expected, cells = self._asked.popleft() if self._asked else (0, [])
                if not cells or answer.num_pieces != expected:
                    raise ByteCountError(f"the receiver counted {answer.num_pieces} pieces, not {expected}: push again")
                for cell in cells:
                    self._cells.give_back(cell)
                self._answered.set()
        finally:
            self._answered.set()
            asyncio.get_running_loop().call_soon(self._on_end)  # once this task is done: `ended` asks for that


async def _is_mapped(call: _SharedCall, status: SentStatus, name: kv_pb2.SharedMemory) -> bool:
    """Send the name of the memory to the receiver, and return whether it has mapped the memory. Returns False also for
    a receiver of an earlier version, which does not know the method."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # it has ended: the reason is read below
        await call.write(kv_pb2.SharedPieces(memory=name))
    try:
        answer = await call.read()
    except grpc.aio.AioRpcError as error:
        ended = status.of(error)
        if ended.code() is not grpc.StatusCode.UNIMPLEMENTED:
            _raise_unless_ok(ended, error)
        return False
    return isinstance(answer, kv_pb2.SharedAnswer) and answer.mapped


def _raise_unless_ok(status: grpc.aio.AioRpcError, raised: grpc.aio.AioRpcError) -> None:
    if status.code() is not grpc.StatusCode.OK:
        raise from_rpc_error(status) from raised


def _retrieve(task: "asyncio.Task[None]") -> None:
    """Read a task's exception, so that asyncio does not log an exception that was never read."""
    if not task.cancelled():
        task.exception()
