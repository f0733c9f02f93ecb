"""Interface of a node's prefix store, through which `transport` reads and stores blocks of cached KV.

Called by `baton.transport.block_exchange`. Implemented by `baton.modeling.prefix_store.store`, which does not depend on
gRPC. A block is the KV of some consecutive tokens of a prompt in all layers. Its name is derived from these tokens and
all tokens before them. Methods may wait for locks and disks, so they must be called in threads.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

from baton.types import KvLayout, TokenRange

BlockPiece = tuple[int, TokenRange, memoryview]
"""Piece of a block, as (layer, token range, bytes of the KV of these tokens in this layer)."""


class OpenBlock(Protocol):
    """Stored block that is open for reading. The store does not evict the block while this object or a view of its
    bytes exists."""

    def export(self, layer: int, tokens: TokenRange) -> memoryview:
        """Return a view of the KV of `tokens` in `layer`. `tokens` must be within the block's range."""
        ...


class BlockStore(Protocol):
    """Prefix store of one node. All of its blocks have the same KV layout."""

    @property
    def layout(self) -> KvLayout:
        """Return the KV layout of all blocks in the store."""
        ...

    def num_leading(self, names: Sequence[str]) -> int:
        """Return the number of blocks at the start of `names` that are stored. Counting stops at the first block that
        is not stored. Raises InvalidArgumentError for an invalid name."""
        ...

    def open_block(self, name: str, tokens: TokenRange) -> OpenBlock:
        """Return a stored block. `tokens` must be the token range of the block. Raises StalePrefixError when the block
        is not stored or has another size, and InvalidArgumentError for a malformed name."""
        ...

    def put_block(
        self, name: str, tokens: TokenRange, pieces: Sequence[BlockPiece], spared: Collection[str]
    ) -> tuple[bool, Sequence[str]]:
        """Store a complete block. `pieces` must contain all tokens of all layers, each exactly once. Return a pair: a
        bool, and the names of the blocks that were evicted to make space. The bool is True if the block is stored
        afterwards, and False if there was not enough space.

        Blocks whose names are in `spared` are not evicted. If the call fails, no part of the block is stored. Raises
        OSError, and ConfigError if the store's folder no longer exists.
        """
        ...
