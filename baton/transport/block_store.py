"""Interface of a node's prefix store, which `transport` uses to read and store blocks of cached KV.

Called by `baton.transport.block_exchange`; implemented by `baton.modeling.prefix_store.store`, which does not depend on
gRPC. A block is the KV of some consecutive tokens of a prompt, in all layers. Its name is derived from these tokens and
all tokens before them. All methods may wait for locks and disks, so they are called on threads.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

from baton.types import KvLayout, TokenRange

BlockPiece = tuple[int, TokenRange, memoryview]
"""A piece of a block: layer, token range, and the bytes of the range's KV in that layer."""


class OpenBlock(Protocol):
    """One stored block that is open for reading. The store keeps the block as long as this object or a view of its
    bytes exists."""

    def export(self, layer: int, tokens: TokenRange) -> memoryview:
        """Return the bytes of some of the block's tokens in `layer`, without a copy."""
        ...


class BlockStore(Protocol):
    """Blocks of one node. All have the same KV layout."""

    @property
    def layout(self) -> KvLayout:
        """Return the layout of the blocks' KV."""
        ...

    def num_leading(self, names: Sequence[str]) -> int:
        """Return the number of leading names whose blocks are stored, up to the first one that is missing. Raises
        InvalidArgumentError for a malformed name."""
        ...

    def open_block(self, name: str, tokens: TokenRange) -> OpenBlock:
        """Return a stored block. `tokens` must be the token range of the block. Raises StalePrefixError when the block
        is not stored or has another size, and InvalidArgumentError for a malformed name."""
        ...

    def put_block(
        self, name: str, tokens: TokenRange, pieces: Sequence[BlockPiece], spared: Collection[str]
    ) -> tuple[bool, Sequence[str]]:
        """Store a block completely or not at all. `pieces` must cover all layers of `tokens`, each once. To make room,
        blocks that are not in `spared` may be evicted. Return whether the store has the block now, and the names of the
        evicted blocks. Raises ConfigError when the store's folder does not exist any more, and OSError."""
        ...
