"""The index of which prefix store holds which blocks, as reported by workers: how much of a prompt is cached where.

A block's name determines all blocks before it (`baton.prefix_blocks`), so the longest prefix is found by looking up one
name after the other until one is missing. The index holds hints: a store is asked for its blocks when it comes into
view, then evicts by itself and says so with its next report, and reports are lost with their workers. A block that is
missing after all costs a second try; a block that the index lacks is found when it is to be stored again. Beyond a
bound, the least recently used names are forgotten; a prompt uses its blocks from the last to the first, so that its
first blocks go last.

Read by `orchestrator.placement.predictions`; written by `orchestrator.dispatch` and
`orchestrator.workers.prefix_discovery`. Pure; on the loop.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

MAX_BLOCKS = 1 << 17
"""Largest number of blocks held for one store: some tens of MiB here, and 16 million tokens in blocks of 128."""


class PrefixIndex:
    """Blocks by the names of the stores that hold them. The empty name stands for no store, which holds nothing."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._held: dict[str, OrderedDict[str, None]] = {}
        """Blocks of each store, the least recently used first."""

    def __len__(self) -> int:
        """Return the number of blocks in all stores."""
        return sum(len(held) for held in self._held.values())

    def num_held(self, store: str, names: Sequence[str]) -> int:
        """Return how many of a prompt's first blocks the store holds; that does not count as a use of them."""
        held = self._held.get(store, ())
        return next((index for index, name in enumerate(names) if name not in held), len(names))

    def holders(self, name: str) -> list[str]:
        """Return the stores that hold the block of that name."""
        return [store for store, held in self._held.items() if name in held]

    def use(self, store: str, names: Sequence[str]) -> None:
        """Record that these first blocks of a prompt are in the store and were just read or written there."""
        if not store or not names:
            return
        held = self._held.setdefault(store, OrderedDict())
        for name in reversed(names):
            held[name] = None
            held.move_to_end(name)
        while len(held) > self._max_blocks:
            held.popitem(last=False)

    def add(self, store: str, names: Sequence[str]) -> None:
        """Record that the store has these blocks, the least recently used first; all count as older than those of
        `use`."""
        held = self._held.setdefault(store, OrderedDict())
        for name in reversed(names[max(len(names) + len(held) - self._max_blocks, 0) :]):
            if name not in held:
                held[name] = None
                held.move_to_end(name, last=False)

    def forget(self, store: str, names: Iterable[str]) -> None:
        """Record that the store does not hold these blocks, whether the index had them or not."""
        held = self._held.get(store, OrderedDict())
        for name in names:
            held.pop(name, None)
        if not held:
            self._held.pop(store, None)

    def keep_only(self, stores: Collection[str]) -> None:
        """Forget all stores but these."""
        for store in self._held.keys() - set(stores):
            del self._held[store]
