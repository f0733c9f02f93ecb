"""Files of the prefix store: format, writing and removal. Each file contains the KV of one block of tokens.

    magic, with the format's version     16 bytes
    layout fingerprint, ASCII            16 bytes       of model, layers, kv heads, head dim, dtype
    tokens, bytes of KV                  2 x int64
    the block's name, ASCII             128 bytes       padded with zeros
    (zeros up to HEADER_BYTES)
    KV `[L, S, 2, G, H]`                 L layers, S tokens, G kv heads, H head dim

`baton.modeling.prefix_store.store` describes the locks on a file. It also counts the bytes of all files of a folder,
while it holds the folder's lock.
"""

import errno
import fcntl
import logging
import mmap
import os
import struct
import tempfile
from pathlib import Path

from baton.errors import ConfigError
from baton.modeling.kv.buffers import KvBuffer
from baton.types import KvLayout, TokenRange

logger = logging.getLogger(__name__)

HEADER_BYTES = 4096
UNSEALED = ".unsealed-"
"""Prefix of the names of files that are still being written."""
_MAGIC = b"Baton prefix v3\n"
_FORMAT = struct.Struct("<16s16sqq128s")
NUM_KNOWN_BYTES = _FORMAT.size
"""Number of bytes at the start of a file's header that `header_of` returns. The rest of the header is zeros."""


def header_of(name: str, layout: KvLayout, num_tokens: int) -> bytes:
    """Return the first NUM_KNOWN_BYTES bytes of the file header of a block with `num_tokens` tokens in this layout."""
    num_bytes = num_tokens * layout.token_bytes
    return _FORMAT.pack(_MAGIC, layout.fingerprint.encode(), num_tokens, num_bytes, name.encode())


class BlockWriter:
    """Writer of one block file. Create it while holding the folder's lock, then call `allocate`, `write` and `seal`.
    `drop` may be called on any thread. The other methods may be called on one thread at a time."""

    def __init__(
        self, path: Path, layout: KvLayout, tokens: TokenRange, used_ns: int, *, in_memory: bool = True
    ) -> None:
        """Create a file with the size of the block, so that the store counts the block's bytes. `tokens` is the token
        range of the block, and `used_ns` the time of its last use in unix nanoseconds. `in_memory` is False if the
        folder is on disk. Raises ConfigError if the file cannot be created."""
        self.name = path.name
        self.tokens = tokens
        self._path = path
        self._layout = layout
        self._used_ns = used_ns
        self._in_memory = in_memory
        self._num_missing = layout.num_layers * len(tokens)
        self._num_bytes = HEADER_BYTES + len(tokens) * layout.token_bytes
        self._over = True
        try:
            self._file, unsealed = tempfile.mkstemp(prefix=UNSEALED, dir=path.parent)
            self._unsealed, self._over = Path(unsealed), False
            fcntl.flock(self._file, fcntl.LOCK_EX)
            os.ftruncate(self._file, self._num_bytes)  # from now on `store` counts the file's bytes
        except OSError as error:
            self.drop()
            raise ConfigError(f"prefix store: no file can be made in {path.parent} ({error.strerror})") from error

    def allocate(self) -> bool:
        """Allocate the memory of the block's file, so that later writes cannot run out of memory. Return True if enough
        memory was available."""
        try:
            os.posix_fallocate(self._file, 0, self._num_bytes)
            # a write to a mapped file on disk would hold the GIL for as long as the disk takes
            mapping = mmap.mmap(self._file if self._in_memory else -1, self._num_bytes)
        except OSError as error:
            logger.warning("block %s is not kept, for lack of memory: %s", self.name, error)
            return False
        mapping[:NUM_KNOWN_BYTES] = header_of(self.name, self._layout, len(self.tokens))
        self._content = memoryview(mapping)
        self._kv = KvBuffer.over(self._layout, self.tokens, self._content[HEADER_BYTES:])
        return True

    def write(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        """Copy the KV of `tokens` to its position in `layer`. The tokens must be within the block, and each token must
        be written exactly once per layer.

        A block on disk is buffered in memory. The call that completes the block writes it to the file. This call blocks
        until the file is written, and raises OSError if writing fails.
        """
        self._kv.write(layer, tokens, data)
        self._num_missing -= len(tokens)
        if not self._num_missing and not self._in_memory:
            num_written = 0
            while num_written < self._num_bytes:
                num_written += os.pwrite(self._file, self._content[num_written:], num_written)
            del self._kv, self._content

    def seal(self) -> None:
        """Rename the file to the name of its block. Call it after all KV has been written, and while holding the
        folder's lock, so that the file is counted exactly once. If a file with this name already exists, that file is
        kept instead."""
        assert not self._num_missing, f"{self._num_missing} rows of block {self.name} were not written"
        os.fchmod(self._file, 0o400)
        os.utime(self._file, ns=(self._used_ns, self._used_ns))
        if not self._path.exists():
            self._unsealed.rename(self._path)
        self.drop()

    def drop(self) -> None:
        """Close the file, and remove it if `seal` has not renamed it. Idempotent."""
        if not self._over:
            self._over = True
            try:
                self._unsealed.unlink(missing_ok=True)
            except OSError as error:  # the next process that takes room tries again
                logger.warning("%s cannot be removed: %s", self._unsealed, error)
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)  # the mapping would keep the lock for a while
                os.close(self._file)


def kv_of(file: int, num_bytes: int, *, in_memory: bool) -> memoryview:
    """Return the KV of an open block file as `num_bytes` writable bytes. Raises OSError if the file cannot be mapped or
    cannot be read completely.

    If `in_memory` is set, the result is a copy-on-write mapping of the file. The mapping keeps the file open, and
    therefore locked, until its last view is freed. Otherwise the result is a copy, so that later reads do not wait for
    the disk.
    """
    if in_memory:
        return memoryview(mmap.mmap(file, HEADER_BYTES + num_bytes, access=mmap.ACCESS_COPY))[HEADER_BYTES:]
    copy = memoryview(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    num_read = 0
    while num_read < num_bytes:
        num_more = os.preadv(file, [copy[num_read:]], HEADER_BYTES + num_read)
        if not num_more:
            raise OSError(errno.EIO, f"the file ends after {num_read} bytes of KV")
        num_read += num_more
    return copy


def has_file(path: Path) -> bool:
    """Return True if the file exists. Return False if it does not exist or the disk fails."""
    try:
        path.stat(follow_symlinks=False)
    except OSError:
        return False
    return True


def remove_unlocked(path: Path) -> bool:
    """Remove a file unless a process holds a lock on it. Return True if the file does not exist any more."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError as error:
        logger.warning("%s cannot be removed: %s", path, error)
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.warning("%s cannot be removed: %s", path, error)
        return False
    finally:
        os.close(file)
    return True


def is_there(path: Path, num_bytes: int) -> bool:
    """Return True if a file of exactly `num_bytes` bytes exists at `path`. A file of another size is removed."""
    try:
        if path.stat(follow_symlinks=False).st_size == num_bytes:
            return True
    except FileNotFoundError:
        return False
    path.unlink(missing_ok=True)
    return False


def free_bytes(folder: Path, *, in_memory: bool) -> int:
    """Return the number of free bytes in the file system of `folder`. If `in_memory` is set, the result is at most the
    available memory, because a file system in memory may report more than that."""
    disk = os.statvfs(folder)
    if not in_memory:
        return disk.f_bavail * disk.f_frsize
    lines = Path("/proc/meminfo").read_text().splitlines()
    memory_kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return min(disk.f_bavail * disk.f_frsize, memory_kib * 1024)
