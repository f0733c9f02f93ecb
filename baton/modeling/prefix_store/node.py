"""Access of one worker to its node's prefix store. The store has a folder in memory and an optional folder on disk.

Prefill workers and generation workers create a NodeStore when they start, and close it when they end. The last process
that uses a folder removes it (`baton.modeling.prefix_store.folder`). Creating and closing a NodeStore do not wait for a
disk that does not answer (`baton.modeling.prefix_store.disk_tier`).
"""

import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from baton.errors import ConfigError
from baton.modeling.prefix_store.disk_tier import ANSWER_S, FOLDER_S, DiskTier
from baton.modeling.prefix_store.folder import StoreFolder, sweep
from baton.modeling.prefix_store.store import PrefixStore
from baton.process.clock import Clock
from baton.types import KvLayout


@dataclass(frozen=True)
class DiskPlace:
    """Settings of the store on disk: its folder, its maximum size in bytes, and the time after which a disk that does
    not answer is no longer used. Blocks that are evicted from memory may still be on disk."""

    folder: Path
    limit_bytes: int
    answer_s: float = ANSWER_S
    """Timeout in seconds. A disk that does not answer within this time is not used until it answers again."""


class NodeStore:
    """Prefix store of a node, with this worker's locks on the store's folders. Creating and closing it are blocking
    calls."""

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
        """Lock the folder in memory, and start to open the folder on disk if `disk` is given.

        `key` is the secret of the workers that share the store (see StoreFolder). Raises ConfigError if the folder in
        memory cannot be created.
        """
        self._key = key
        self._lock = threading.Lock()
        """Lock for `_disk_folder` and `_is_closed`."""
        self._disk_folder: StoreFolder | None = None
        self._is_closed = False
        self._folder = StoreFolder(folder, key)
        self._below = None
        if disk is not None:
            opening = partial(self._open_disk, disk, layout, clock)
            self._below = DiskTier(opening, disk.folder, disk.limit_bytes, clock=clock, answer_s=disk.answer_s)
        self.blocks = PrefixStore(self._folder.path, layout, limit_bytes=limit_bytes, clock=clock, below=self._below)

    def close(self) -> None:
        """Release the locks on the folders. Call once."""
        self._folder.close()
        with self._lock:
            self._is_closed = True
            on_disk = self._disk_folder
        if self._below is not None and on_disk is not None:
            self._below.ask(lambda _: on_disk.close(), None, FOLDER_S)

    def _open_disk(self, disk: DiskPlace, layout: KvLayout, clock: Clock) -> PrefixStore:
        """Lock the folder on disk and return its store. A thread removes folders next to it that killed clusters did
        not remove."""
        folder = StoreFolder(disk.folder, self._key)
        with self._lock:
            is_late = self._is_closed
            self._disk_folder = None if is_late else folder
        if is_late:
            folder.close()
            raise ConfigError(f"prefix store: {disk.folder} answered when its worker had ended")
        store = PrefixStore(folder.path, layout, limit_bytes=disk.limit_bytes, clock=clock)
        threading.Thread(target=sweep, args=(disk.folder.parent,), name="prefix-sweep", daemon=True).start()
        return store
