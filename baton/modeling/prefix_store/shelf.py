"""List of the files in a prefix store's folder, from which the least recently used blocks are evicted.

Used by `baton.modeling.prefix_store.store`.
"""

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
"""Name of the lock file in a prefix store's folder. A process that holds the lock on this file holds the lock on the
folder."""


@dataclass
class Shelf:
    """List of the blocks in a prefix store's folder that are permitted to be evicted, with the total size of the
    folder's files. The caller must hold the lock on the folder."""

    folder: Path
    blocks: list[tuple[int, str, int]] = field(default_factory=list)
    """Blocks that are permitted to be evicted, each as (time of last use in unix nanoseconds, name, bytes). The least
    recently used block is the last one."""
    num_bytes: int = 0
    """Total size of all files in the folder in bytes, including blocks that must not be evicted and files that are
    still being written."""

    @classmethod
    def of(cls, folder: Path, *, spared: Collection[str]) -> Self:
        """Remove the incomplete files of killed writers. Return a Shelf that counts all remaining files in the folder.
        `blocks` lists all complete blocks, except those whose names are in `spared`."""
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
        """Evict the least recently used blocks until the files have at most `left_bytes` bytes in total, or until no
        block can be evicted. Blocks that are being read are not evicted. Return the names of the evicted blocks."""
        gone = []
        while self.num_bytes > left_bytes and self.blocks:
            _, name, size = self.blocks.pop()
            if remove_unlocked(self.folder / name):
                self.num_bytes -= size
                gone.append(name)
        return gone


def files_in(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the name and the status of each file in a store's folder, except the lock file. Yields nothing if the
    folder does not exist."""
    if not folder.is_dir():
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # the file was dropped, or without the lock sealed or evicted
                if entry.name != LOCK:
                    yield entry.name, entry.stat(follow_symlinks=False)
