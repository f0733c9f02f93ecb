"""Whole blocks read from and written to a prefix store, for the exchange with other nodes.

Implements `baton.transport.block_store.BlockStore`, which this layer must not import. The servicers of both worker
roles connect the two. Any thread. All methods may wait for locks and disks.
"""

from collections.abc import Collection, Sequence
from itertools import takewhile

from baton.modeling.kv.buffers import KvBuffer
from baton.modeling.prefix_store.store import Filled, PrefixStore
from baton.types import KvLayout, TokenRange


class WholeBlocks:
    """Blocks of one node's store. It has no state except the store's files."""

    def __init__(self, store: PrefixStore) -> None:
        self._store = store

    @property
    def layout(self) -> KvLayout:
        """Return the layout of the blocks' KV."""
        return self._store.layout

    def num_leading(self, names: Sequence[str]) -> int:
        """Return the number of leading blocks of `names` that are stored, in memory or on disk, up to the first gap."""
        return sum(1 for _ in takewhile(self._store.has, names))

    def open_block(self, name: str, tokens: TokenRange) -> KvBuffer:
        """Return a stored block as the KV of `tokens`. The block counts as used now. Raises StalePrefixError when it is
        not stored or has another size, and InvalidArgumentError for a bad name."""
        return self._store.open_block(name, tokens)

    def put_block(
        self,
        name: str,
        tokens: TokenRange,
        pieces: Sequence[tuple[int, TokenRange, memoryview]],
        spared: Collection[str],
    ) -> Filled:
        """Store a block whose KV rows are `pieces`, each row once, as (layer, tokens, bytes). A reader finds the block
        complete or not at all. Blocks in `spared` are not evicted for it. Without room nothing is stored and no error
        raised. Raises ConfigError when no file can be made in the folder, InvalidArgumentError for a bad name."""
        room = self._store.take((name,), tokens, len(tokens), spared=spared)
        try:
            for writer in room.writers:
                for piece in pieces:
                    writer.write(*piece)
            room.seal()
            return room.filled((name,))
        finally:
            room.drop()
