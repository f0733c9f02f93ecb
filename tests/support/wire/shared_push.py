"""A PushShared call controlled by the test, which sends valid or invalid messages and reads the answers. Also checks
for shared memory that was not released."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from baton.process.crash_notes import NOTE_PREFIX
from baton.transport.shared_memory import NAME, SharedCells
from baton.transport.status_interceptor import from_rpc_error
from baton.v1 import kv_pb2
from tests.support.wire.kv_loopback import Loopback

_CELL_BYTES = 2**24
_NUM_CELLS = 8

Call = grpc.aio.StreamStreamCall[kv_pb2.SharedPieces, kv_pb2.SharedAnswer]


class SharedPush:
    """Sender that is controlled by the test. Raises the receiver's errors."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.cells = SharedCells(_NUM_CELLS, _CELL_BYTES)

    async def name(self, memory: kv_pb2.SharedMemory | None = None) -> bool:
        """Announce the shared memory, by default the sender's own. Return True if the receiver has mapped it."""
        answer = await self._ask(kv_pb2.SharedPieces(memory=memory or self.cells.name))
        assert answer is not None
        return answer.mapped

    def put(self, piece: kv_pb2.KvPiece) -> kv_pb2.SharedPiece:
        """Put a piece's payload into a free cell."""
        offset = self.cells.take()
        assert offset is not None
        self.cells.write(offset, memoryview(piece.payload))
        return kv_pb2.SharedPiece(header=piece.header, offset=offset, num_bytes=len(piece.payload))

    async def send(self, *pieces: kv_pb2.SharedPiece) -> int:
        """Send one message that asks for an answer; return how many pieces were written since the last one."""
        answer = await self._ask(kv_pb2.SharedPieces(pieces=pieces, answer=True))
        assert answer is not None
        return answer.num_pieces

    async def finish(self) -> kv_pb2.PushReply:
        """End the stream; return what the receiver counted."""
        await self.call.done_writing()
        answer = await self._read()
        assert answer is not None
        assert await self._read() is None
        return answer.total

    async def _ask(self, message: kv_pb2.SharedPieces) -> kv_pb2.SharedAnswer | None:
        await self.call.write(message)
        return await self._read()

    async def _read(self) -> kv_pb2.SharedAnswer | None:
        try:
            answer = await self.call.read()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        return answer if isinstance(answer, kv_pb2.SharedAnswer) else None


@asynccontextmanager
async def shared_push(loop: Loopback) -> AsyncIterator[SharedPush]:
    """A call that has not named its memory yet."""
    method: grpc.aio.StreamStreamMultiCallable[kv_pb2.SharedPieces, kv_pb2.SharedAnswer] = loop.channel.stream_stream(
        "/baton.v1.KvReceiver/PushShared", kv_pb2.SharedPieces.SerializeToString, kv_pb2.SharedAnswer.FromString
    )
    push = SharedPush(method())
    try:
        yield push
    finally:
        push.call.cancel()
        push.cells.close()


def shared_files(pid: int | str = "self") -> list[str]:
    """Return the shared memory files that a process has open or mapped."""
    process = Path("/proc", str(pid))
    mapped = [line for line in (process / "maps").read_text().splitlines() if f"memfd:{NAME}" in line]
    targets = []
    for link in (process / "fd").iterdir():
        try:
            targets.append(str(link.readlink()))
        except FileNotFoundError:
            continue  # the file descriptor was closed meanwhile
    return mapped + [target for target in targets if f"memfd:{NAME}" in target]


def files_in_memory() -> list[str]:
    """Return the names of all files in the node's folder of shared memory. Semaphores and crash notes are left out, and
    so are folders, because they belong to tests that run at the same time."""
    paths = Path("/dev/shm").iterdir()
    return sorted(path.name for path in paths if not path.is_dir() and not path.name.startswith(("sem.", NOTE_PREFIX)))
