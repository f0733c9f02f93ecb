"""Prefix cache of a node: blocks of KV in files in memory. A block is written once, and all workers read it in place.

Prefill ranks and `generate_workers.prefixes` read and fill the store. A prefix is a list of blocks, and attention
processes each block as one segment. A file has a header of HEADER_BYTES bytes (`block_files`), followed by the KV of
one block's tokens in all layers. Callers name blocks: equal names must mean equal tokens, and equal tokens before them.

Invariants, which hold even when processes die:

    limit     All files together have at most `limit_bytes` bytes. Space is reserved for whole blocks, under the
              folder's lock. If space is lacking, the least recently used blocks are evicted.
    readers   A reader holds a shared lock on a file while the file is mapped, that is, until the last view is freed.
              Mapped files are not evicted. A block that is missing or has another layout raises StalePrefixError.
    writers   A writer holds the exclusive lock on a file whose temporary name no reader can request. Sealing the block
              renames the file to the block's name. The file never changes after that. The file of a killed writer is
              not locked, and the next `take` removes it.

A store may have a second store below it, on disk, with its own folder and limit. Blocks are copied to the disk after
they are sealed, when no request waits for the copy. They are not copied at eviction, because a request would have to
wait. Blocks on disk are copied to memory for readers. A disk that does not answer counts as empty (`disk_tier`).

The kernel releases the locks of a process that dies, so no process has to keep a list of readers. Files are mapped
copy-on-write: readers share the pages and cannot change the files. Processes share no state except the files, so any
thread of any worker process of the node may use the store.
"""

import contextlib
import fcntl
import logging
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path

from baton.errors import ConfigError, InvalidArgumentError, StalePrefixError
from baton.modeling.kv.buffers import KvBuffer
from baton.modeling.prefix_store.block_files import (
    HEADER_BYTES,
    NUM_KNOWN_BYTES,
    UNSEALED,
    BlockWriter,
    free_bytes,
    has_file,
    header_of,
    is_there,
    kv_of,
)
from baton.modeling.prefix_store.disk_tier import FOLDER_S, DiskTier
from baton.modeling.prefix_store.folder import MEMORY, boot_id
from baton.modeling.prefix_store.holdings import COUNTED_S, Holdings
from baton.modeling.prefix_store.shelf import LOCK, Shelf, files_in
from baton.process.clock import Clock
from baton.types import KvLayout, TokenRange

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_-]{0,127}")


@dataclass(frozen=True)
class Leading:
    """KV of the blocks of a prompt before the first block that is not stored."""

    blocks: tuple[KvBuffer, ...]
    num_disk_bytes: int
    """Number of bytes of KV that were read from the store on disk."""


@dataclass(frozen=True)
class Filled:
    """Result of a write: the names of the blocks that are stored now, and of the blocks that were evicted."""

    stored: tuple[str, ...] = ()
    """Names of the requested blocks that are stored now, in the order of the prompt."""
    evicted: tuple[str, ...] = ()
    """Names of blocks that were evicted to make room. Blocks that are known to be on disk are omitted."""


@dataclass
class BlockRoom:
    """Reserved space for blocks that are to be written. The caller must call `seal` or `drop`."""

    locked: Callable[[], AbstractContextManager[None]]
    """Function that returns a context manager, which holds the lock on the store's folder."""
    writers: "list[BlockWriter]" = field(default_factory=list)
    """Writers of the blocks that are to be written, one for each block, in the order of the prompt."""
    present: list[str] = field(default_factory=list)
    """Names of the requested blocks that were already stored and are not written again."""
    evicted: list[str] = field(default_factory=list)
    """Names of blocks that were evicted to make room. Blocks that are known to be on disk are omitted."""

    def allocate(self) -> None:
        """Allocate the memory of the blocks. If a block's memory cannot be allocated, this block and all blocks after
        it are dropped."""
        for index, writer in enumerate(self.writers):
            if not writer.allocate():
                self.give_up(index)

    def give_up(self, index: int) -> None:
        """Remove the writer at `index` in `writers`, and all later ones. Release the space of their blocks."""
        for writer in self.writers[index:]:
            writer.drop()
        del self.writers[index:]

    def seal(self) -> None:
        """Publish all blocks, which must be complete. If a block is already stored, the stored one is kept."""
        with self.locked():
            for writer in self.writers:
                writer.seal()

    def filled(self, names: Sequence[str]) -> Filled:
        """Return those of `names` whose blocks are stored now, and the names in `evicted`. Call after `seal`."""
        stored = {*self.present, *(writer.name for writer in self.writers)}
        return Filled(tuple(name for name in names if name in stored), tuple(self.evicted))

    def drop(self) -> None:
        """Release the reserved space of blocks that were not published by `seal`. Idempotent."""
        for writer in self.writers:
            writer.drop()


class PrefixStore:
    """Prefix cache in `folder`, shared by all workers of a node. Its blocks have one layout, and together at most
    `limit_bytes` bytes. `clock` provides the unix time of a block's last use. Raises ConfigError if the folder does not
    exist."""

    def __init__(
        self,
        folder: Path,
        layout: KvLayout,
        *,
        limit_bytes: int,
        clock: Clock,
        below: "DiskTier[PrefixStore] | None" = None,
    ) -> None:
        """Open the store. Blocks that are not in `folder` are looked up in `below`, a store on disk."""
        if not folder.is_dir():
            raise ConfigError(f"prefix store: {folder} is not a folder: make one in /dev/shm")
        self.limit_bytes = limit_bytes
        self.layout = layout
        self.below = below
        self._folder = folder
        self._in_memory = folder.is_relative_to(MEMORY)
        self._clock = clock
        stat = folder.stat()
        self.identity = f"{boot_id()}:{stat.st_dev}:{stat.st_ino}"
        """Unique id of the folder, equal in all processes. A later folder with the same path has a different id."""
        self._num_disk_bytes = 0
        """Number of bytes of the store on disk at the last count."""
        self._counted_s = -math.inf
        """Time in seconds at which the last count of the bytes on disk was started. Minus infinity: never."""

    def holdings(self) -> Holdings:
        """Return the current numbers of blocks and bytes in the store; 0 if the folder no longer exists.

        Incomplete files of killed writers are counted until a process reserves space. While other processes write, a
        block and its replacement may both be counted. The call does not wait for the disk: it returns the last count of
        files on disk, and starts a new count every COUNTED_S seconds.
        """
        sizes = [stat.st_size for _, stat in files_in(self._folder)]
        held = Holdings(len(sizes), sum(sizes), self.limit_bytes)
        if self.below is None:
            return held
        now_s = self._clock.now_s()
        if now_s - self._counted_s >= COUNTED_S:
            self._counted_s = now_s
            self.below.begin(self._count)
        limit_bytes, fault = self.below.limit_bytes, self.below.fault
        return replace(held, num_disk_bytes=self._num_disk_bytes, limit_disk_bytes=limit_bytes, disk_fault=fault)

    def names(self) -> list[str]:
        """Return the names of all sealed (complete) blocks: first those on disk, then those in memory, each part from
        the least to the most recently used block."""
        below = self.below.ask(self._files_below, []) if self.below is not None else []
        return list(dict.fromkeys([*_sealed(below), *_sealed(files_in(self._folder))]))

    def has(self, name: str) -> bool:
        """Return whether the block is stored now, in memory or on disk."""
        return has_file(self._path(name)) or (
            self.below is not None and self.below.ask(lambda below: below.has(name), False)
        )

    def num_leading(self, names: Sequence[str]) -> int:
        """Return the number of blocks of `names` before the first one that is stored neither in memory nor on disk."""
        return sum(1 for _ in takewhile(self.has, names))

    def _files_below(self, below: "PrefixStore") -> list[tuple[str, os.stat_result]]:
        assert self.below is not None
        files = []
        for file in files_in(below._folder):
            self.below.answered()
            files.append(file)
        return files

    def _count(self, below: "PrefixStore") -> None:
        try:
            self._num_disk_bytes = sum(stat.st_size for _, stat in self._files_below(below))
        except OSError as error:
            logger.warning("prefix store: the files on disk cannot be counted: %s", error)

    def sink(self, names: Sequence[str], tokens: TokenRange, block_tokens: int) -> list[str]:
        """Copy consecutive blocks of a prompt, which contain `tokens`, to the store on disk, if one exists. Return the
        names of blocks that the store on disk evicted to make room and that are not in memory.

        Copies blocks that are in memory and not on disk, if they fit into the store on disk. Stops at the first block
        that has been evicted from memory meanwhile. The call blocks until the copy is complete, so no request should
        wait for it. Raises the same errors as `take`, and OSError.
        """
        if self.below is None or not names:
            return []
        gone = self.below.ask(lambda below: self._sink(below, names, tokens, block_tokens), [], FOLDER_S)
        return [name for name in gone if not has_file(self._path(name))]

    def _sink(self, below: "PrefixStore", names: Sequence[str], tokens: TokenRange, block_tokens: int) -> list[str]:
        """Copy blocks to the store on disk, and return the names of blocks that it has evicted."""
        assert self.below is not None
        room = below.take(names, tokens, block_tokens)
        try:
            for index, writer in enumerate(room.writers):
                try:
                    block = self._open_here(writer.name, writer.tokens, self._clock.unix_ns())
                except StalePrefixError as stale:
                    logger.debug("not all of %d blocks exist to be sunk: %s", len(names), stale)
                    room.give_up(index)
                    break
                for layer in range(self.layout.num_layers):
                    writer.write(layer, writer.tokens, block.export(layer, writer.tokens))
                self.below.answered()
            room.seal()
        finally:
            room.drop()
        return [name for name in room.evicted if not below.has(name)]

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Return a context manager that holds the folder's lock, so that no other process can reserve space."""
        try:
            file = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"prefix store: no file can be made in {self._folder} ({error.strerror})") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    def open(self, names: Sequence[str], block_tokens: int) -> tuple[KvBuffer, ...]:
        """Return the KV of consecutive complete blocks, beginning with the prompt's first block. Each block has
        `block_tokens` tokens.

        Buffers of blocks in memory are views of the files, and a file is not evicted until its last view is freed.
        Buffers of blocks on disk are copies, and the call waits until they are read. The call updates the blocks' times
        of last use; the prompt's first block becomes the most recently used one. Raises StalePrefixError if a block is
        not stored or has another layout or size, and InvalidArgumentError for an invalid name.
        """
        return tuple(block for block, _ in self._opening(names, block_tokens))

    def open_block(self, name: str, tokens: TokenRange) -> KvBuffer:
        """Return the KV of one block as a buffer for the positions `tokens`. Raises the same errors as `open`."""
        return self._open(name, tokens, self._clock.unix_ns())[0]

    def put_block(
        self,
        name: str,
        tokens: TokenRange,
        pieces: Sequence[tuple[int, TokenRange, memoryview]],
        spared: Collection[str],
    ) -> tuple[bool, Sequence[str]]:
        """Store one complete block. `pieces` is its KV as (layer, tokens, bytes), and must contain each token of
        each layer once. Readers do not see the block before it is complete. No block in `spared` is evicted to make
        room. Return True if the block is stored now, and the names of the evicted blocks. Raises the same errors as
        `take`."""
        room = self.take((name,), tokens, len(tokens), spared=spared)
        try:
            for writer in room.writers:
                for piece in pieces:
                    writer.write(*piece)
            room.seal()
            return bool(room.filled((name,)).stored), room.evicted
        finally:
            room.drop()

    def open_leading(self, names: Sequence[str], block_tokens: int) -> "Leading":
        """Return the KV of all blocks of `names` before the first one that is not stored: views or copies, as in
        `open`. Raises InvalidArgumentError for an invalid name."""
        found: list[tuple[KvBuffer, int]] = []
        try:
            found.extend(self._opening(names, block_tokens))  # keeps those before the one that fails
        except StalePrefixError as stale:
            logger.debug("%d of %d blocks exist: %s", len(found), len(names), stale)
        return Leading(tuple(block for block, _ in found), sum(num_bytes for _, num_bytes in found))

    def _opening(self, names: Sequence[str], block_tokens: int) -> Iterator[tuple[KvBuffer, int]]:
        """Yield each block with the number of its bytes that were read from disk."""
        now_ns = self._clock.unix_ns()
        for index, name in enumerate(names):
            tokens = TokenRange(index * block_tokens, (index + 1) * block_tokens)
            yield self._open(name, tokens, now_ns - index)  # no frame keeps a block: an error's traceback would hold it

    def take(
        self, names: Sequence[str], tokens: TokenRange, block_tokens: int, *, spared: Collection[str] = ()
    ) -> BlockRoom:
        """Reserve space for consecutive blocks of a prompt, which together contain `tokens`: `block_tokens` in each
        block.

        Evicts blocks that are not being read and whose names are neither in `names` nor in `spared`. If there is still
        not enough space, the last blocks are omitted without an error. May wait for the folder's lock. Raises
        ConfigError if no file can be created in the folder, and InvalidArgumentError for an invalid name.
        """
        assert len(tokens) == len(names) * block_tokens, f"{len(names)} names for {tokens}"
        paths = [self._path(name) for name in names]
        room = BlockRoom(self.locked)
        try:
            with self.locked():
                self._claim(room, paths, tokens.split(block_tokens), spared)
            room.allocate()
            if self.below is not None and room.evicted:
                gone = room.evicted
                room.evicted = self.below.ask(lambda below: [name for name in gone if not below.has(name)], gone)
        except BaseException:
            room.drop()
            raise
        return room

    def _claim(
        self, room: BlockRoom, paths: Sequence[Path], parts: Sequence[TokenRange], spared: Collection[str]
    ) -> None:
        """Record the blocks that are already stored, and reserve bytes for the others as far as they fit. The caller
        holds the lock."""
        size = HEADER_BYTES + len(parts[0]) * self.layout.token_bytes
        shelf = Shelf.of(self._folder, spared={*spared, *(path.name for path in paths)})
        now_ns = self._clock.unix_ns()
        left_bytes = free_bytes(self._folder, in_memory=self._in_memory) + shelf.num_bytes
        for index, (path, part) in enumerate(zip(paths, parts, strict=True)):
            if is_there(path, size):
                os.utime(path, ns=(now_ns - index, now_ns - index))
                room.present.append(path.name)
                continue
            room.evicted += shelf.clear(self.limit_bytes - size)
            shelf.num_bytes += size
            if shelf.num_bytes > min(self.limit_bytes, left_bytes):
                break
            room.writers.append(BlockWriter(path, self.layout, part, now_ns - index, in_memory=self._in_memory))

    def _open(self, name: str, tokens: TokenRange, used_ns: int) -> tuple[KvBuffer, int]:
        try:
            return self._open_here(name, tokens, used_ns), 0
        except StalePrefixError:
            if self.below is None:
                raise
        block = self.below.ask(lambda below: below._open_here(name, tokens, used_ns), None)
        if block is None:
            raise StalePrefixError(f"block {name} is not in memory, and the disk does not answer: prefill without it")
        return block, block.num_bytes

    def _open_here(self, name: str, tokens: TokenRange, used_ns: int) -> KvBuffer:
        path = self._path(name)
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise StalePrefixError(f"block {name} is not in {self._folder}: prefill without it") from error
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            self._check(name, file, len(tokens))
            os.utime(file, ns=(used_ns, used_ns))
            memory = kv_of(file, len(tokens) * self.layout.token_bytes, in_memory=self._in_memory)
        except OSError as error:  # locked by a process that removes it, no memory for it, or a disk that fails
            raise StalePrefixError(f"block {name} cannot be read ({error.strerror}): prefill without it") from error
        finally:
            os.close(file)
        return KvBuffer.over(self.layout, tokens, memory)

    def _check(self, name: str, file: int, num_tokens: int) -> None:
        """Raise StalePrefixError for a block whose file was removed, or whose content does not match its name. A file
        that does not match is removed."""
        stat = os.fstat(file)
        if not stat.st_nlink:
            raise StalePrefixError(f"block {name} has been removed: prefill without it")
        num_bytes = num_tokens * self.layout.token_bytes
        header = os.pread(file, NUM_KNOWN_BYTES, 0)
        if header != header_of(name, self.layout, num_tokens) or stat.st_size != HEADER_BYTES + num_bytes:
            wanted = f"{num_tokens} tokens in layout {self.layout.fingerprint}"
            logger.warning("block %s in %s is not of %s: removing it", name, self._folder, wanted)
            self._path(name).unlink(missing_ok=True)
            raise StalePrefixError(f"block {name} in {self._folder} is not of {wanted}: prefill without it")

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise InvalidArgumentError(f"block name {name!r} is not valid: use up to 128 letters, digits, - or _")
        return self._folder / name


def _sealed(files: Iterable[tuple[str, os.stat_result]]) -> list[str]:
    """Return the names of the sealed blocks among a folder's files, least recently used first."""
    return [
        name for _, name in sorted((stat.st_mtime_ns, name) for name, stat in files if not name.startswith(UNSEALED))
    ]
