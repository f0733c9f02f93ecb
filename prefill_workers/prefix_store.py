"""Cached prefixes of a node: KV in files in memory, written once, read in place by every rank that needs it.

A file holds the KV of one prompt prefix in all layers, as KvBuffer lays it out, behind a header of one page:

    magic, with the format's version     16 bytes
    layout fingerprint, ASCII            16 bytes       of model, layers, kv heads, head dim, dtype
    tokens, bytes of KV                  2 x int64
    (zeros up to HEADER_BYTES)
    KV `[L, S, 2, G, H]`                 L layers, S tokens, G kv heads, H head dim

A file has no name before it is sealed, and never changes afterwards: a reader finds all of it or nothing, and a writer
that dies leaves nothing behind. Its room is taken when it is created, so nobody runs out of memory while writing. Ranks
map it copy-on-write, so they share its pages and cannot spoil it; one that is removed stays readable to those that have
mapped it. Names are chosen by whoever decides what to keep: equal names must mean equal tokens.

The folder outlives ranks and belongs to the node (/dev/shm, where the files are memory). Step 5 of a request's way
(DESIGN.md, sections 4 and 5). No state but the files: any thread, any process.
"""

import errno
import mmap
import os
import re
import struct
from pathlib import Path
from typing import Self

from baton.errors import (
    ByteCountError,
    ConfigError,
    InvalidArgumentError,
    LayoutMismatchError,
    NotFoundError,
    ResourceExhaustedError,
)
from baton.types import KvLayout, TokenRange
from modeling.kv_buffers import KvBuffer

HEADER_BYTES = 4096
_MAGIC = b"Baton prefix v1\n"
_FORMAT = struct.Struct("<16s16sqq")
_NAME = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.-]{0,127}")
_FULL = (errno.ENOSPC, errno.EFBIG, errno.ENOMEM, errno.EDQUOT)


class PrefixStore:
    """The prefixes in `folder`, of one layout. Raises ConfigError when there is no such folder."""

    def __init__(self, folder: Path, layout: KvLayout) -> None:
        if not folder.is_dir():
            raise ConfigError(f"prefix store: {folder} is no folder: make one in /dev/shm")
        self._folder = folder
        self._layout = layout

    def create(self, name: str, num_tokens: int) -> "PrefixWriter":
        """Takes room for the KV of `num_tokens` tokens; write all layers and seal it, in a `with` block.

        Raises InvalidArgumentError for a bad name, ResourceExhaustedError when file system or memory have no room, and
        ConfigError when no file can be made there.
        """
        return PrefixWriter(self._path(name), self._layout, TokenRange(0, num_tokens))

    def open(self, name: str) -> KvBuffer:
        """The KV of a sealed prefix: a view of the file, mapped until the last view of the buffer is gone.

        Raises InvalidArgumentError for a bad name, NotFoundError, LayoutMismatchError when it was made by another model
        or version, and ByteCountError when the file was cut.
        """
        path = self._path(name)
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                tokens = self._check(name, os.pread(file, _FORMAT.size, 0), os.fstat(file).st_size)
                size = HEADER_BYTES + len(tokens) * self._layout.token_bytes
                mapping = mmap.mmap(file, size, access=mmap.ACCESS_COPY)
            finally:
                os.close(file)
        except FileNotFoundError as error:
            raise NotFoundError(f"prefix {name!r} is not in {self._folder}: prefill without it") from error
        except OSError as error:
            raise ConfigError(f"prefix {name!r} in {self._folder} cannot be mapped ({error.strerror})") from error
        return KvBuffer.over(self._layout, tokens, memoryview(mapping)[HEADER_BYTES:])

    def remove(self, name: str) -> None:
        """Forgets a prefix, present or not; its memory is given back when nobody has it mapped any more."""
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise InvalidArgumentError(f"prefix = {name!r} is no name: use up to 128 letters, digits, or any of _.-")
        return self._folder / name

    def _check(self, name: str, header: bytes, file_bytes: int) -> TokenRange:
        """The tokens that a file says it holds, once header and length are known to be right."""
        magic, fingerprint, num_tokens, num_bytes = _FORMAT.unpack(header.ljust(_FORMAT.size, b"\0"))
        if file_bytes < HEADER_BYTES or magic != _MAGIC:
            raise LayoutMismatchError(f"prefix {name!r} is no prefix file of this version: remove it")
        if fingerprint != self._layout.fingerprint.encode():
            raise LayoutMismatchError(
                f"prefix {name!r} is of layout {fingerprint.decode(errors='replace')}, this rank's is "
                f"{self._layout.fingerprint}: prefill without it"
            )
        if (
            num_tokens < 1
            or num_bytes != num_tokens * self._layout.token_bytes
            or file_bytes != HEADER_BYTES + num_bytes
        ):
            raise ByteCountError(
                f"prefix {name!r} has {file_bytes} bytes, {num_tokens} tokens take "
                f"{HEADER_BYTES + num_tokens * self._layout.token_bytes}: remove it"
            )
        return TokenRange(0, num_tokens)


class PrefixWriter:
    """A prefix that is being written; made by PrefixStore.create. Not thread-safe."""

    def __init__(self, path: Path, layout: KvLayout, tokens: TokenRange) -> None:
        assert len(tokens), "a prefix has at least one token"
        self.tokens = tokens
        self._path = path
        self._missing = set(range(layout.num_layers))
        size = HEADER_BYTES + len(tokens) * layout.token_bytes
        if size > _room_bytes(path.parent):
            raise ResourceExhaustedError(f"prefix store: no room for {size} bytes in {path.parent}: remove some")
        try:
            self._file = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o444)
        except OSError as error:
            raise ConfigError(f"prefix store: no file can be made in {path.parent} ({error.strerror})") from error
        try:
            os.posix_fallocate(self._file, 0, size)
            mapping = mmap.mmap(self._file, size)
        except OSError as error:
            os.close(self._file)
            if error.errno not in _FULL:
                raise ConfigError(f"prefix store: {path.parent} gives no memory ({error.strerror})") from error
            raise ResourceExhaustedError(
                f"prefix store: no room for {size} bytes in {path.parent}: remove some"
            ) from error
        kv_bytes = size - HEADER_BYTES
        mapping[: _FORMAT.size] = _FORMAT.pack(_MAGIC, layout.fingerprint.encode(), len(tokens), kv_bytes)
        self._kv = KvBuffer.over(layout, tokens, memoryview(mapping)[HEADER_BYTES:])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        """Drops the file, unless it was sealed."""
        os.close(self._file)
        del self._kv

    def write(self, layer: int, data: memoryview) -> None:
        """Copies the rows of all tokens in `layer`, as KvBuffer.export gives them, into place. May be called again."""
        self._kv.write(layer, self.tokens, data)
        self._missing.discard(layer)

    def seal(self) -> None:
        """All layers were written: from here on the prefix has its name, and does not change. If one of that name has
        been sealed in the meantime, that one stays."""
        assert not self._missing, f"layers {sorted(self._missing)} of prefix {self._path.name} were not written"
        folder = os.open(self._path.parent, os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # a folder's descriptor, because only so does os.link follow the link that /proc has for the file
            os.link(f"/proc/self/fd/{self._file}", self._path.name, dst_dir_fd=folder, follow_symlinks=True)
        except FileExistsError:
            assert self._path.is_file(), self._path
        finally:
            os.close(folder)


def _room_bytes(folder: Path) -> int:
    """What the file system has free, and the machine: in memory, the former may promise what the latter has not."""
    disk = os.statvfs(folder)
    lines = Path("/proc/meminfo").read_text().splitlines()
    memory_kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return min(disk.f_bavail * disk.f_frsize, memory_kib * 1024)
