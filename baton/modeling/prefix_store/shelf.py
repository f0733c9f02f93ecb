"""Files of a store's folder, and eviction of the least recently used. Used by `baton.modeling.prefix_store.store`."""

import contextlib
import logging
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from baton.modeling.prefix_store.block_files import UNSEALED, remove_unlocked

logger = logging.getLogger(__name__)

LOCK = ".lock"
"""Name of the file in a store's folder whose lock is used as the lock of the folder."""


@dataclass
class Shelf:
    """Files of a folder, listed under the folder's lock, which the caller holds."""

    folder: Path
    blocks: list[tuple[int, str, int]] = field(default_factory=list)
    """(unix ns of last use, name, bytes) of each block that may be evicted. The least recently used block is last."""
    num_bytes: int = 0
    """Bytes of all files."""

    @classmethod
    def of(cls, folder: Path, *, spared: Collection[str]) -> Self:
        """Remove the files of killed writers, and return the other files of the folder. Blocks in `spared` may not be
        evicted."""
        for unsealed in folder.glob(UNSEALED + "*"):
            if remove_unlocked(unsealed):
                logger.info("removed %s, which a writer had left", unsealed)
        shelf = cls(folder)
        for name, stat in files_in(folder):
            shelf.num_bytes += stat.st_size
            if not name.startswith(UNSEALED) and name not in spared:
                shelf.blocks.append((stat.st_mtime_ns, name, stat.st_size))
        shelf.blocks.sort(reverse=True)
        return shelf

    def clear(self, left_bytes: int) -> list[str]:
        """Evict blocks that are not being read, until at most `left_bytes` bytes remain or no block can be evicted.
        Return the names of the evicted blocks."""
        gone = []
        while self.num_bytes > left_bytes and self.blocks:
            _, name, size = self.blocks.pop()
            if remove_unlocked(self.folder / name):
                self.num_bytes -= size
                gone.append(name)
        return gone


def files_in(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the name and status of each file in a store's folder, except its lock. Yields none if the folder does not
    exist."""
    if not folder.is_dir():
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # the file was dropped, or without the lock sealed or evicted
                if entry.name != LOCK:
                    yield entry.name, entry.stat(follow_symlinks=False)
