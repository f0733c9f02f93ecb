"""One worker's use of its node's prefix store: the folder in memory, the one on disk, if any, and their blocks.

Both worker roles make one at their start and close it at their end. The folders' last user removes them (`folder`).
"""

from dataclasses import dataclass
from pathlib import Path

from baton.clock import Clock
from baton.types import KvLayout
from modeling.prefix_store.folder import StoreFolder
from modeling.prefix_store.store import PrefixStore


@dataclass(frozen=True)
class DiskPlace:
    """Folder on disk for blocks that memory may have no room for, and the bytes that they may take."""

    folder: Path
    limit_bytes: int


class NodeStore:
    """The prefix store of a node, and this worker's hold on its folders. Blocks while it is made and closed."""

    def __init__(
        self,
        folder: Path,
        layout: KvLayout,
        *,
        limit_bytes: int,
        clock: Clock,
        disk: DiskPlace | None = None,
        key: str = "",
    ) -> None:
        """`key`: the secret of those who share the store (see StoreFolder). Raises ConfigError when a folder cannot be
        made."""
        self._folders = [StoreFolder(folder, key)]
        below = None
        if disk is not None:
            self._folders.append(StoreFolder(disk.folder, key))
            below = PrefixStore(self._folders[1].path, layout, limit_bytes=disk.limit_bytes, clock=clock)
        self.blocks = PrefixStore(self._folders[0].path, layout, limit_bytes=limit_bytes, clock=clock, below=below)

    def close(self) -> None:
        """Let go of the folders. Call once."""
        for folder in self._folders:
            folder.close()
