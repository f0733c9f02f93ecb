"""One worker's use of its node's prefix store: the folder in memory, the one on disk, if any, and what is in them.

Step 5 of a request's way (DESIGN.md, sections 4 and 5). Whoever is last removes the folders (`store_folder`).
"""

from dataclasses import dataclass
from pathlib import Path

from baton.clock import Clock
from baton.types import KvLayout
from modeling.prefix_store.folder import StoreFolder, node_folder
from modeling.prefix_store.store import PrefixStore


@dataclass(frozen=True)
class DiskPlace:
    """Where blocks go that memory may have no room for, and how much of them."""

    folder: Path
    bound_bytes: int


class NodeStore:
    """The store, and this worker's hold on its folders. Blocks while it is made and closed."""

    def __init__(
        self, folder: Path, layout: KvLayout, *, bound_bytes: int, clock: Clock, disk: DiskPlace | None = None
    ) -> None:
        """Raises ConfigError when a folder cannot be made."""
        self._folders = [StoreFolder(folder)]
        below = None
        if disk is not None:
            self._folders.append(StoreFolder(disk.folder))
            below = PrefixStore(disk.folder, layout, bound_bytes=disk.bound_bytes, clock=clock)
        self.blocks = PrefixStore(folder, layout, bound_bytes=bound_bytes, clock=clock, below=below)

    def close(self) -> None:
        """Lets go of the folders. Once."""
        for folder in self._folders:
            folder.close()


def disk_place(cluster: str, parent: str, num_bytes: int) -> DiskPlace | None:
    """Where a cluster's workers keep blocks on disk, below the folder `parent`; None for no bytes."""
    return DiskPlace(node_folder(cluster, Path(parent)), num_bytes) if num_bytes else None
