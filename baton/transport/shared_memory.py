"""Memory that the sender and the receiver of a push share if they run on one node: the sender writes payloads into it,
and the receiver maps it.

The memory is a file without a name (memfd_create). It is in no folder, and it is freed when all processes that have it
open or mapped have ended. Its size is sealed (it can no longer change), so reading mapped memory cannot fail. gRPC does
not pass descriptors, so the receiver opens /proc/PID/fd/N, which the kernel allows only processes of the same user, and
recognises the file by the random key at its beginning. On another node, in a container with its own process ids, or as
another user the receiver finds no such file, and the push uses gRPC only.

Used by `baton.transport.kv_routes` (CellPool) and `baton.transport.kv_receiver` (map_memory), on their processes'
loops.
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
"""Name by which /proc/PID/maps and /proc/PID/fd show shared memory: memfd:baton-kv."""
KEY_BYTES = 16
TURN_BYTES = 2**19
"""Number of bytes that one call may copy before it yields to the event loop's other calls."""
MAX_MAPPED_BYTES = 2**30
"""Maximum number of bytes that a receiver maps for one push. It limits the memory that a sender can make the receiver
page in."""
_FIRST_CELL = mmap.PAGESIZE
"""Offset of the first cell. The first page holds only the key."""
_MODE = 0o600


class SharedCells:
    """Newly allocated shared memory, divided into cells of equal size. A cell is in use from `take` to `give_back`.

    The cell that was returned last is reused first, because it is likely to be in a CPU cache. So a push with a fast
    receiver uses few pages. Owned by the sender's route, and used on its loop.
    """

    def __init__(self, num_cells: int, cell_bytes: int) -> None:
        """Allocate the memory. Raises OSError if it cannot be allocated."""
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
        """Message from which the receiver finds this memory."""
        self.cell_bytes = cell_bytes
        self._all = [_FIRST_CELL + number * cell_bytes for number in reversed(range(num_cells))]
        self._free = list(self._all)

    def take(self) -> int | None:
        """Mark a free cell as in use and return its offset; None when all cells are in use."""
        return self._free.pop() if self._free else None

    def give_back(self, offset: int) -> None:
        """Mark a cell as free, once the receiver has read its payloads."""
        self._free.append(offset)

    def write(self, offset: int, payload: memoryview) -> None:
        """Copy a payload to `offset`, which must be in a cell in use."""
        self._mapped[offset : offset + payload.nbytes] = payload

    def reset(self) -> None:
        """Mark all cells as free, once no receiver reads them any more. They are then used in the same order as in new
        memory."""
        self._free = list(self._all)

    def close(self) -> None:
        """Release the memory. A receiver that has mapped it may still read it. Call once."""
        self._mapped.close()
        os.close(self._descriptor)


class CellPool:
    """Shared memory of one sender for pushes of one KV layout. Later pushes reuse it, which avoids page faults in new
    memory.

    Owned by the process's servicer; used on its loop.
    """

    def __init__(self, num_cells: int, cell_bytes: int, most_kept: int = 2) -> None:
        """`num_cells` and `cell_bytes` are the number and size of the cells of each SharedCells. `most_kept` is the
        maximum number of SharedCells that are kept while no push uses them."""
        self._num_cells, self._cell_bytes, self._most_kept = num_cells, cell_bytes, most_kept
        self._kept: list[SharedCells] = []

    def take(self) -> SharedCells | None:
        """Return shared memory that no push uses. Return None, and log the reason, if it cannot be allocated. The
        caller passes the memory to `give_back`, or closes it."""
        if self._kept:
            return self._kept.pop()
        try:
            return SharedCells(self._num_cells, self._cell_bytes)
        except OSError as error:
            logger.debug("no shared memory for a push: %s", error)
            return None

    def give_back(self, cells: SharedCells) -> None:
        """Keep the memory for a later push. Its receiver must not read it any more."""
        cells.reset()
        self._kept.append(cells)
        while len(self._kept) > self._most_kept:
            self._kept.pop(0).close()

    def close(self) -> None:
        """Release all memory in the pool. Memory that is returned later is released immediately. Idempotent."""
        self._most_kept = 0
        while self._kept:
            self._kept.pop().close()


class Turns:
    """Yields to the event loop's other calls while one call copies the payloads of a long message."""

    def __init__(self) -> None:
        self._num_bytes = 0
        """Number of bytes that were copied since the last yield."""

    async def take(self, num_bytes: int) -> None:
        """Count copied bytes. Yield to other calls after every TURN_BYTES bytes."""
        self._num_bytes += num_bytes
        if self._num_bytes >= TURN_BYTES:
            self._num_bytes = 0
            await asyncio.sleep(0)


def map_memory(name: kv_pb2.SharedMemory) -> mmap.mmap | None:
    """Map a sender's memory for reading. It stays mapped until the last view of it is freed. Return None if `name` does
    not identify such memory.

    The message is not trusted. A file is mapped only if it belongs to this process's user, is not accessible to other
    users, has no name, has a sealed size, and begins with the key.
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
    """Return a view of a piece's payload. Raises InvalidArgumentError for a payload that is not within the memory, or
    is larger than a message of a stream may be."""
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
