"""Shared memory for pushes of KV between a sender and a receiver on the same node. The sender writes payloads into the
memory, and the receiver maps it.

The memory is an anonymous file (memfd_create). It is in no directory, and the kernel frees it when no process has it
open or mapped. Its size is sealed, so it cannot change, and reading mapped memory cannot fail. gRPC cannot pass file
descriptors. The receiver therefore opens /proc/PID/fd/N, which the kernel allows only to processes of the same user,
and recognises the file by the random key at its beginning. A receiver on another node, in a container with its own
process ids, or of another user does not find the file. The push then uses gRPC only.

Used on the event loops of `baton.transport.kv_routes` (CellPool) and `baton.transport.kv_receiver` (map_memory).
"""

import asyncio
import fcntl
import logging
import mmap
import os
import secrets
import stat
from pathlib import Path

from baton.errors import InvalidArgumentError
from baton.limits import MAX_MESSAGE_BYTES
from baton.v1 import kv_pb2

logger = logging.getLogger(__name__)

NAME = "baton-kv"
"""Name of the shared memory file. /proc/PID/maps and /proc/PID/fd show it as `memfd:baton-kv`."""
KEY_BYTES = 16
TURN_BYTES = 2**19
"""Number of bytes that a call may copy before it yields to other tasks of the event loop."""
MAX_MAPPED_BYTES = 2**30
"""Maximum number of bytes that a receiver maps for one push. Limits the memory that a sender can make the receiver's
process use."""
_FIRST_CELL = mmap.PAGESIZE
"""Offset in bytes of the first cell, a unit of the memory that a sender fills. The first page holds only the random key
that identifies the file."""
_MODE = 0o600


class SharedCells:
    """Block of shared memory, divided into cells of equal size. A cell is in use from `take` until `give_back`.

    The cell that was freed last is reused first, because it is probably still in a CPU cache. A push to a fast receiver
    therefore uses few pages. Owned by the sender's route, and used on its event loop.
    """

    def __init__(self, num_cells: int, cell_bytes: int) -> None:
        """Allocate shared memory for `num_cells` cells of `cell_bytes` bytes each. Raises OSError if it cannot be
        allocated."""
        if not hasattr(os, "memfd_create"):
            raise OSError("this operating system has no memfd_create")
        key = secrets.token_bytes(KEY_BYTES)
        num_bytes = _FIRST_CELL + num_cells * cell_bytes
        self._descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(self._descriptor, _MODE)
            os.ftruncate(self._descriptor, num_bytes)
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _seals() | fcntl.F_SEAL_SEAL)
            self._mapped = mmap.mmap(self._descriptor, num_bytes)
        except OSError:
            os.close(self._descriptor)
            raise
        self._mapped[:KEY_BYTES] = key
        self.name = kv_pb2.SharedMemory(pid=os.getpid(), descriptor=self._descriptor, num_bytes=num_bytes, key=key)
        """Protobuf message from which the receiver finds this memory: process id, file descriptor, size and key."""
        self.cell_bytes = cell_bytes
        self._all = [_FIRST_CELL + number * cell_bytes for number in reversed(range(num_cells))]
        self._free = list(self._all)

    def take(self) -> int | None:
        """Mark a free cell as in use and return its offset in bytes. Return None if all cells are in use."""
        return self._free.pop() if self._free else None

    def give_back(self, offset: int) -> None:
        """Mark the cell at byte `offset` as free. Call when the receiver has read the cell's payloads."""
        self._free.append(offset)

    def write(self, offset: int, payload: memoryview) -> None:
        """Copy a payload into the memory at byte `offset`. The offset must be within a cell that is in use."""
        self._mapped[offset : offset + payload.nbytes] = payload

    def reset(self) -> None:
        """Mark all cells (units of the memory) as free, so that they are used in the same order as in new memory. Call
        only when no receiver reads them any more."""
        self._free = list(self._all)

    def close(self) -> None:
        """Release the memory. A receiver that has mapped it can still read it. Must be called only once."""
        self._mapped.close()
        os.close(self._descriptor)


class CellPool:
    """Pool of shared memory of one sender, for pushes of one KV layout. Pushes reuse the memory of earlier pushes,
    because new memory would cause page faults.

    Owned by the process's servicer; used on its event loop.
    """

    def __init__(self, num_cells: int, cell_bytes: int, most_kept: int = 2) -> None:
        """Create an empty pool. Each SharedCells object of the pool has `num_cells` cells of `cell_bytes` bytes. The
        pool keeps at most `most_kept` SharedCells objects that no push uses."""
        self._num_cells, self._cell_bytes, self._most_kept = num_cells, cell_bytes, most_kept
        self._kept: list[SharedCells] = []

    def take(self) -> SharedCells | None:
        """Return shared memory that no push uses, from the pool or newly allocated. Return None, and log the reason, if
        memory cannot be allocated. The caller must pass the memory to `give_back`, or close it."""
        if self._kept:
            return self._kept.pop()
        try:
            return SharedCells(self._num_cells, self._cell_bytes)
        except OSError as error:
            logger.debug("no shared memory for a push: %s", error)
            return None

    def give_back(self, cells: SharedCells) -> None:
        """Return memory to the pool for a later push. The caller must ensure that no receiver still reads it."""
        cells.reset()
        self._kept.append(cells)
        while len(self._kept) > self._most_kept:
            self._kept.pop(0).close()

    def close(self) -> None:
        """Release all memory in the pool. Memory that is passed to `give_back` after this call is released immediately.
        Idempotent."""
        self._most_kept = 0
        while self._kept:
            self._kept.pop().close()


class Turns:
    """Counter of copied bytes for one call that copies the payloads of a long message. At regular intervals, it lets
    other tasks of the event loop run."""

    def __init__(self) -> None:
        self._num_bytes = 0
        """Number of bytes copied since the last yield."""

    async def take(self, num_bytes: int) -> None:
        """Record that the call has copied `num_bytes` more bytes. If it has copied at least TURN_BYTES bytes since the
        last yield, yield to other tasks of the event loop."""
        self._num_bytes += num_bytes
        if self._num_bytes >= TURN_BYTES:
            self._num_bytes = 0
            await asyncio.sleep(0)


def map_memory(name: kv_pb2.SharedMemory) -> mmap.mmap | None:
    """Map a sender's shared memory for reading, and return the mapping. Return None if `name` does not identify valid
    shared memory. The memory stays mapped until the last view of it is freed.

    The message `name` is not trusted. A file is mapped only if it belongs to this process's user, is not accessible to
    other users, is anonymous, has a sealed size, and begins with the expected key.
    """
    path = Path("/proc", str(name.pid), "fd", str(name.descriptor))
    try:
        if not _is_shared(path.stat(), name):  # checked first: opening other kinds of files may have effects
            return None
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        logger.debug("a push's shared memory is not on this node, or not this user's: %s", error)
        return None
    try:
        return _mapped(descriptor, name)
    except OSError as error:
        logger.debug("a push's shared memory cannot be mapped: %s", error)
        return None
    finally:
        os.close(descriptor)


def payload_at(memory: mmap.mmap, piece: kv_pb2.SharedPiece) -> memoryview:
    """Return a view of a piece's payload in the mapped memory. Raises InvalidArgumentError if the payload is not within
    the memory, or is larger than the maximum size of a stream's message."""
    if piece.num_bytes > MAX_MESSAGE_BYTES:
        raise InvalidArgumentError(
            f"num_bytes = {piece.num_bytes} is out of range: a payload has {MAX_MESSAGE_BYTES} bytes at most"
        )
    if piece.offset < _FIRST_CELL or piece.offset + piece.num_bytes > len(memory):
        raise InvalidArgumentError(
            f"offset = {piece.offset} with num_bytes = {piece.num_bytes} is out of range: payloads are in bytes "
            f"[{_FIRST_CELL}, {len(memory)}) of the shared memory"
        )
    return memoryview(memory)[piece.offset : piece.offset + piece.num_bytes]


def _mapped(descriptor: int, name: kv_pb2.SharedMemory) -> mmap.mmap | None:
    is_sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _seals() == _seals()
    if not is_sealed or not _is_shared(os.fstat(descriptor), name):
        return None
    if not secrets.compare_digest(os.pread(descriptor, KEY_BYTES, 0), name.key):
        return None
    return mmap.mmap(descriptor, name.num_bytes, prot=mmap.PROT_READ)


def _is_shared(found: os.stat_result, name: kv_pb2.SharedMemory) -> bool:
    return (
        stat.S_ISREG(found.st_mode)
        and stat.S_IMODE(found.st_mode) == _MODE
        and found.st_uid == os.geteuid()
        and found.st_nlink == 0
        and _FIRST_CELL < found.st_size == name.num_bytes <= MAX_MAPPED_BYTES
    )


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
