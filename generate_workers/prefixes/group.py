"""A generation group's part in its node's prefix store: leases begin with blocks from there, answers go there.

The folder is the one that the node's prefill ranks use, where there are any; whoever is last removes it (store_folder).
"""

import asyncio
from pathlib import Path

from baton.clock import Clock
from generate_workers.prefixes.answer_saving import AnswerSaver
from generate_workers.prefixes.loading import PrefixLoader
from generate_workers.slots.table import SlotTable
from modeling.prefix_store.node import DiskPlace, NodeStore


class GroupPrefixes:
    """Store, loader and saver over one table of slots. On the loop; the saver is the engine's, which ends it."""

    def __init__(
        self, folder: Path, slots: SlotTable, *, bound_bytes: int, clock: Clock, disk: DiskPlace | None = None
    ) -> None:
        """Raises ConfigError when a folder cannot be made."""
        self._node = NodeStore(folder, slots.layout, bound_bytes=bound_bytes, clock=clock, disk=disk)
        self.store = self._node.blocks
        self.loader = PrefixLoader(slots, self.store)
        self.saver = AnswerSaver(self.store)

    async def close(self) -> None:
        """Once the engine has ended. Once."""
        await self.loader.close()
        await asyncio.to_thread(self._node.close)
