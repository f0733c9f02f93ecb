"""A generation group's use of its node's prefix store: leases begin with blocks from it, answers are stored in it.

`servicer` makes it on the asyncio loop. The folder is the one that the node's prefill ranks use, if the node has any;
its last user removes it (`modeling.prefix_store.folder`).
"""

import asyncio
from pathlib import Path

from baton.clock import Clock
from generate_workers.prefixes.answer_saving import AnswerSaver
from generate_workers.prefixes.loading import PrefixLoader
from generate_workers.slots.table import SlotTable
from modeling.prefix_store.node import DiskPlace, NodeStore


class GroupPrefixes:
    """Prefix store, loader and saver of one table of slots. Used on the loop."""

    def __init__(
        self, folder: Path, slots: SlotTable, *, limit_bytes: int, clock: Clock, disk: DiskPlace | None = None
    ) -> None:
        """Raise ConfigError when a folder cannot be made."""
        self._node = NodeStore(folder, slots.layout, limit_bytes=limit_bytes, clock=clock, disk=disk)
        self.store = self._node.blocks
        self.loader = PrefixLoader(slots, self.store)
        self.saver = AnswerSaver(slots, self.store)

    async def close(self) -> None:
        """Wait for loads, give up unsaved answers, and let go of the folders. Call once, after the engine has ended."""
        await self.loader.close()
        await asyncio.to_thread(self.saver.close)
        await asyncio.to_thread(self._node.close)
