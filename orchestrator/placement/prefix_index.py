"""Which prefix store holds which blocks, as far as its workers have said: so how much of a prompt is cached.

A tree over blocks of tokens, in which each store has its nodes. A block's name says the way to it (`prefix_blocks`), so
a node is found by its name alone, and the longest prefix by asking for one name after the other from the root, until
one is missing: a lookup a block, however much is held. Edges would say the same once more, and have to be kept right.

What is here are hints. A store is asked what it holds when it comes into view (`prefix_stores`); from then on it evicts
by itself and says so with the next report, and reports are lost with their workers: a block that is not there after all
costs a second try, one that nobody knows of is found when it is to be kept again. Nodes that were used longest ago are
forgotten beyond a number; a prompt uses its blocks from the last to the first, so these are leaves.

Step 3 of a request's way (DESIGN.md, section 4). Pure; on the loop.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

MAX_BLOCKS = 1 << 17
"""Of one store: some tens of MiB here, and 16 million tokens in blocks of 128."""


class PrefixIndex:
    """Stores by their names, as groups of either role have them; an empty one is none, and holds nothing."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._held: dict[str, OrderedDict[str, None]] = {}
        """Each store's blocks, the one that was used longest ago first."""

    def __len__(self) -> int:
        """Blocks in all stores."""
        return sum(len(held) for held in self._held.values())

    def num_held(self, store: str, names: Sequence[str]) -> int:
        """How many of a prompt's first blocks the store holds. Changes nothing: a store that is only considered has
        not been used."""
        held = self._held.get(store, ())
        return next((index for index, name in enumerate(names) if name not in held), len(names))

    def use(self, store: str, names: Sequence[str]) -> None:
        """These blocks of a prompt, from its first on, are in the store, and were just read or written there."""
        if not store or not names:
            return
        held = self._held.setdefault(store, OrderedDict())
        for name in reversed(names):
            held[name] = None
            held.move_to_end(name)
        while len(held) > self._max_blocks:
            held.popitem(last=False)

    def add(self, store: str, names: Sequence[str]) -> None:
        """These blocks are in the store, those first that were used longest ago, and none of them since `use` was told
        of one."""
        held = self._held.setdefault(store, OrderedDict())
        for name in reversed(names[max(len(names) + len(held) - self._max_blocks, 0) :]):
            if name not in held:
                held[name] = None
                held.move_to_end(name, last=False)

    def forget(self, store: str, names: Iterable[str]) -> None:
        """The store does not hold these, whether they were known or not."""
        held = self._held.get(store, OrderedDict())
        for name in names:
            held.pop(name, None)
        if not held:
            self._held.pop(store, None)

    def keep_only(self, stores: Collection[str]) -> None:
        """All other stores are gone."""
        for store in self._held.keys() - set(stores):
            del self._held[store]
