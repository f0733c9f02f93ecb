"""Index of the blocks in each prefix store, as reported by workers. It shows how much of a prompt is cached in which
store.

The name of a block depends on all blocks before it (`baton.prefix_blocks`). So the longest cached prefix is found by
looking up one name after the other until one is missing.

The entries are only hints. The blocks of a store are listed when the store appears. Later the store evicts blocks by
itself, and a worker reports the evictions with its next answer. A report is lost if the worker dies. If a listed block
is missing in the store, the prefill is repeated without cached blocks. If a stored block is not listed, its tokens are
computed again; the block is noticed when the prefill would store it a second time.

The number of names per store is limited. Above the limit, the least recently used names are removed. The blocks of a
prompt are marked as used from the last to the first, so that its first blocks are removed last.

Read by `orchestrator.placement.options`; written by `orchestrator.dispatch` and
`orchestrator.workers.prefix_discovery`. Does no I/O. Runs on the event loop.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

MAX_BLOCKS = 1 << 17
"""Maximum number of blocks listed per store. The list of one store takes some tens of MiB, and represents 16 million
tokens in blocks of 128 tokens."""


class PrefixIndex:
    """Lists the names of the blocks in each prefix store, by the name of the store. A worker without a store is
    represented by the empty store name, which has no blocks."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._held: dict[str, OrderedDict[str, None]] = {}
        """Names of the blocks in each store, by the name of the store. The least recently used block comes first."""

    def __len__(self) -> int:
        """Return the number of blocks, summed over all stores."""
        return sum(len(held) for held in self._held.values())

    def num_held(self, store: str, names: Sequence[str]) -> int:
        """Return how many of a prompt's leading blocks the store has. `names` are the names of the prompt's blocks, in
        order. The blocks are not marked as used."""
        held = self._held.get(store, ())
        return next((index for index, name in enumerate(names) if name not in held), len(names))

    def holders(self, name: str) -> list[str]:
        """Return the names of the stores that have the block with this name."""
        return [store for store, held in self._held.items() if name in held]

    def use(self, store: str, names: Sequence[str]) -> None:
        """Record that these leading blocks of a prompt are in the store and have just been read or written."""
        if not store or not names:
            return
        held = self._held.setdefault(store, OrderedDict())
        for name in reversed(names):
            held[name] = None
            held.move_to_end(name)
        while len(held) > self._max_blocks:
            held.popitem(last=False)

    def add(self, store: str, names: Sequence[str]) -> None:
        """Record that the store has these blocks. `names` starts with the least recently used block. Blocks that are
        not listed yet are added as less recently used than all listed ones."""
        held = self._held.setdefault(store, OrderedDict())
        for name in reversed(names[max(len(names) + len(held) - self._max_blocks, 0) :]):
            if name not in held:
                held[name] = None
                held.move_to_end(name, last=False)

    def forget(self, store: str, names: Iterable[str]) -> None:
        """Remove these blocks from the store's list. Names that are not listed are ignored."""
        held = self._held.get(store, OrderedDict())
        for name in names:
            held.pop(name, None)
        if not held:
            self._held.pop(store, None)

    def keep_only(self, stores: Collection[str]) -> None:
        """Remove all stores from the index except those in `stores`."""
        for store in self._held.keys() - set(stores):
            del self._held[store]
