"""Prefix stores for tests: a folder in shared memory that must be clean at the end, and blocks to store in it."""

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from baton.modeling.kv.buffers import KvBuffer
from baton.modeling.prefix_store.block_files import HEADER_BYTES
from baton.modeling.prefix_store.disk_tier import DiskTier
from baton.modeling.prefix_store.store import BlockRoom, PrefixStore
from baton.process.clock import Clock
from baton.types import KvLayout, TokenRange
from tests.support.engines.chains import until
from tests.support.manual_clock import ManualClock

PLENTY = 1 << 30


def mapped(folder: Path) -> list[str]:
    """Return this process's mappings of files in `folder`, including removed files."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


def blocks_in(folder: Path) -> set[str]:
    """Return the names of all blocks, sealed (completely written) or not, and of unexpected files."""
    return {each.name for each in folder.iterdir()} - {".lock"}


def sealed_blocks_in(folder: Path) -> set[str]:
    """Return the names of the sealed blocks."""
    return {name for name in blocks_in(folder) if not name.startswith(".")}


@contextmanager
def prefix_folder() -> Iterator[Path]:
    """Create a folder in shared memory, like the one of a node. At the end, check that no file is mapped or partially
    written."""
    with TemporaryDirectory(dir="/dev/shm", prefix="baton-test-", ignore_cleanup_errors=True) as made:
        folder = Path(made)
        yield folder
        until(lambda: not mapped(folder))
        assert not folder.exists() or not [name for name in blocks_in(folder) if name.startswith(".")]


def store_in(folder: Path, layout: KvLayout, *, limit_bytes: int = PLENTY, clock: Clock | None = None) -> PrefixStore:
    """Open a store. By default, its clock does not advance."""
    return PrefixStore(folder, layout, limit_bytes=limit_bytes, clock=clock or ManualClock(1e9))


def on_disk(store: PrefixStore) -> DiskTier[PrefixStore]:
    """Return the store as a disk tier below another store. Its clock does not advance."""
    return DiskTier(lambda: store, Path("the disk"), store.limit_bytes, clock=ManualClock(1e9))


@contextmanager
def hung(folder: Path) -> Iterator[None]:
    """Create a folder whose lock is held, so that a store there can be neither opened nor closed."""
    folder.mkdir(0o700)
    file = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def file_bytes(layout: KvLayout, block_tokens: int) -> int:
    """Return the size in bytes of a block's file."""
    return HEADER_BYTES + block_tokens * layout.token_bytes


def random_kv(layout: KvLayout, num_tokens: int, seed: int = 0) -> KvBuffer:
    """Return random KV for the first `num_tokens` tokens of a prompt."""
    buffer = KvBuffer(layout, TokenRange(0, num_tokens))
    buffer.data.copy_(torch.randn(buffer.data.shape, generator=torch.Generator().manual_seed(seed)))
    return buffer


def same(read: Sequence[KvBuffer], kv: KvBuffer) -> bool:
    """Return whether the blocks hold the KV of the first tokens of `kv`."""
    data = torch.cat([each.data for each in read], dim=1)
    return torch.equal(data, kv.data[:, : data.shape[1]])


def fill(room: BlockRoom, kv: KvBuffer) -> None:
    """Write KV to all blocks of the reserved room, and seal them (mark them as complete)."""
    for writer in room.writers:
        for layer in range(kv.layout.num_layers):
            writer.write(layer, writer.tokens, kv.export(layer, writer.tokens))
    room.seal()


def keep(store: PrefixStore, kv: KvBuffer, names: Sequence[str] = ("p",)) -> BlockRoom:
    """Store `kv` in blocks of equal length, one per name."""
    block_tokens = len(kv.tokens) // len(names)
    kept = TokenRange(kv.tokens.start, kv.tokens.start + len(names) * block_tokens)
    room = store.take(names, kept, block_tokens)
    fill(room, kv)
    return room
