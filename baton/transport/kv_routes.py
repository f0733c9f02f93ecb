"""The two routes by which a push sends its pieces of KV: a gRPC stream that contains their bytes, or shared memory if
the receiver is on the same node.

`baton.transport.kv_sender` opens one of them for each push and sends pieces over it; `baton.transport.kv_receiver` is
at the other end. Both routes use one gRPC call, whose status is the status of the push. Used on the asyncio loop.
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
"""Maximum payload of one piece in bytes; a piece always has at least one token. The size is large enough for
throughput, and small enough that an event loop that checks and copies pieces can still serve other calls promptly."""
NUM_CELLS = 16
"""Number of cells of one push. It limits the push's shared memory to about the size that gRPC allows in flight in a
stream."""
CELLS_PER_ANSWER = NUM_CELLS // 2
"""Number of full cells after which a message requests an answer. Half of the cells are filled while the receiver reads
the other half. Messages and answers are sent rarely, because each costs more than copying a small piece."""
MAX_PIECES = 64
"""Maximum number of pieces in a message."""
_ALIGNED = 64
"""Alignment of payloads in their cell, in bytes: a cache line."""

_StreamCall = grpc.aio.StreamUnaryCall[Piece, kv_pb2.PushReply]
_SharedCall = grpc.aio.StreamStreamCall[kv_pb2.SharedPieces, kv_pb2.SharedAnswer]


class Route(Protocol):
    """Route of one push's pieces to its receiver. After the call has ended, `send`, `flush` and `finish` raise
    AioRpcError or InvalidStateError, and `reply` raises the reason."""

    is_shared: bool
    """True if payloads go through shared memory."""

    @property
    def ended(self) -> bool:
        """True once the receiver has ended the push, so that no more pieces can be sent."""
        ...

    async def send(self, header: kv_pb2.KvPieceHeader, payload: memoryview) -> None:
        """Send a piece immediately or in one message with later pieces. Copies the payload. Waits while the receiver is
        slower than the sender."""
        ...

    async def flush(self) -> None:
        """Send all pieces that are waiting for a message to be filled."""
        ...

    async def finish(self) -> None:
        """Send all waiting pieces, and notify the receiver that they were the last ones."""
        ...

    async def reply(self) -> kv_pb2.PushReply | None:
        """Return the receiver's counts once the call has ended; None if it ended without an error and without counts.
        Raises the receiver's error."""
        ...

    def close(self) -> None:
        """End the call if it is still running, and release all memory."""
        ...


class StreamRoute:
    """Sends pieces as messages of a gRPC stream, whose flow control limits the data that is encoded and
    not yet sent."""

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
        """True once the call has ended."""
        return self._call.done()

    async def send(self, header: kv_pb2.KvPieceHeader, payload: memoryview) -> None:
        """Send a piece. Waits while gRPC's flow control does not accept more data."""
        await self._call.write((header, payload))

    async def flush(self) -> None:
        """Do nothing: every piece has already been sent."""

    async def finish(self) -> None:
        """End the stream of pieces."""
        await self._call.done_writing()

    async def reply(self) -> kv_pb2.PushReply | None:
        """Return the call's answer."""
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
    """Sends pieces in cells of shared memory, and messages that name the location of each piece. Make it with `open`.

    A cell holds several pieces, and is reused once the receiver has acknowledged all of them. So the sender waits for a
    slow receiver when all cells are full. Each cell in use is either being filled, in `_full`, or in `_asked`. If no
    cell is free, an answer has been requested.
    """

    is_shared = True

    def __init__(
        self, call: _SharedCall, status: SentStatus, pool: CellPool, cells: SharedCells, on_end: Callable[[], None]
    ) -> None:
        """Take over a call whose receiver has mapped the memory of `cells`. The cells come from `pool`."""
        self._call = call
        self._status = status
        self._pool = pool
        self._cells = cells
        self._on_end = on_end
        self._cell: int | None = None
        """Offset of the cell that is being filled; None if there is none."""
        self._num_used = 0
        """Number of bytes of the current cell that are used."""
        self._full: list[int] = []
        """Offsets of full cells for which no answer has been requested yet."""
        self._filled: list[kv_pb2.SharedPiece] = []
        """Pieces of the next message."""
        self._num_unasked = 0
        """Number of pieces that were sent since the last message that requested an answer."""
        self._asked: deque[tuple[int, list[int]]] = deque()
        """Requested answers: for each, the number of pieces that it acknowledges and the offsets of the cells that it
        frees."""
        self._answered = asyncio.Event()
        self._turns = Turns()
        self._total: kv_pb2.PushReply | None = None
        self._reading = asyncio.get_running_loop().create_task(self._read())
        self._reading.add_done_callback(_retrieve)

    @classmethod
    async def open(cls, channel: grpc.aio.Channel, pool: CellPool, on_end: Callable[[], None]) -> Self | None:
        """Open the call and let the receiver map shared memory from the pool. Return None when the pool has no memory,
        or the receiver cannot map it. Raises the receiver's error."""
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
        """True once the receiver's last answer has been read."""
        return self._reading.done()

    async def send(self, header: kv_pb2.KvPieceHeader, payload: memoryview) -> None:
        """Copy the payload into a cell. Send the message once it has enough pieces. Waits while no cell is free."""
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
        """Send a message with the pieces that were copied into cells since the last message, if there are any."""
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
        """Send the last message, and end the stream of messages."""
        await self.flush()
        await self._call.done_writing()

    async def reply(self) -> kv_pb2.PushReply | None:
        """Return the receiver's last answer, once it has arrived."""
        try:
            await self._reading
        except grpc.aio.AioRpcError as error:
            _raise_unless_ok(self._status.of(error), error)
        return self._total

    def close(self) -> None:
        """End the call, and return the shared memory to the pool. The pool reuses it for a later push if the receiver
        does not read it any more."""
        self._call.cancel()
        self._reading.cancel()
        if self._total is not None:
            self._pool.give_back(self._cells)
        else:
            self._cells.close()

    async def _place(self, num_bytes: int) -> int:
        """Return the offset in a cell at which a payload of this size can be written. Waits while no cell is free."""
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
