"""The port through which blocks of cached KV enter and leave `transport`: a node's prefix store.

Called by `baton.transport.block_exchange`; implemented by `baton.modeling.prefix_store.store`, which does not
depend on gRPC. A block is the KV of some consecutive tokens of a prompt, in all layers. Its name stands for those
tokens and all tokens before them. All methods may wait for locks and disks, so they are called on threads.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

from baton.types import KvLayout, TokenRange

BlockPiece = tuple[int, TokenRange, memoryview]
"""A layer, some tokens of a block, and the bytes of their rows in that layer."""


class OpenBlock(Protocol):
    """One stored block. The store keeps the block as long as this object or a view of its bytes exists."""

    def export(self, layer: int, tokens: TokenRange) -> memoryview:
        """Return the bytes of some of the block's tokens in `layer`, without a copy."""
        ...


class BlockStore(Protocol):
    """The blocks of a node, all of one layout."""

    @property
    def layout(self) -> KvLayout:
        """Return the layout of the blocks' KV."""
        ...

    def num_leading(self, names: Sequence[str]) -> int:
        """Return how many of these blocks are stored, from the first one on without a gap. Raises InvalidArgumentError
        for a malformed name."""
        ...

    def open_block(self, name: str, tokens: TokenRange) -> OpenBlock:
        """Return a stored block, which must be the KV of `tokens`. Raises StalePrefixError when the block is not
        stored or has another size, and InvalidArgumentError for a malformed name."""
        ...

    def put_block(
        self, name: str, tokens: TokenRange, pieces: Sequence[BlockPiece], spared: Collection[str]
    ) -> tuple[bool, Sequence[str]]:
        """Store a block, whole or not at all: `pieces` cover all layers of `tokens`, each once. Evicts blocks that are
        not in `spared` to make room. Return whether the store has the block now, and the names of the evicted blocks.
        Raises ConfigError when the store's folder is gone, and OSError."""
        ...
