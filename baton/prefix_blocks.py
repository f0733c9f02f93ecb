"""Names of prompt blocks. A name identifies the tokens of a block and all tokens before the block.

The name of a block is a hash of the block's token ids and of the previous block's name. Two prompts have the same names
for exactly those whole blocks that belong to their common prefix. The first hash also includes the fingerprint of the
KV layout, because KV differs between models, and a salt. Prompts with different salts have no names in common. Names do
not change when processes are restarted.

The orchestrator computes the names of blocks of prompts. A generation group computes the names of blocks of its outputs
(DESIGN.md, section 5). All functions are pure.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

_NAME_BYTES = 16


@dataclass(frozen=True)
class BlockNaming:
    """Parameters of block names: the number of tokens of a block, and the salt."""

    block_tokens: int
    salt: str = ""


@dataclass(frozen=True)
class PromptBlocks:
    """Names of the whole blocks of one prompt."""

    names: tuple[str, ...]
    block_tokens: int
    num_tokens: int
    """Number of tokens in the prompt, including tokens after the last whole block."""

    @classmethod
    def of(cls, token_ids: Sequence[int], block_tokens: int, layout_fingerprint: str, salt: str = "") -> "PromptBlocks":
        """Compute the names of the blocks of a prompt.

        `token_ids` is the prompt, `block_tokens` the number of tokens of a block, and `layout_fingerprint` the
        fingerprint of the cluster's KV layout. Takes tenths of a millisecond for thousands of tokens.
        """
        name = hashlib.blake2b(f"{layout_fingerprint}\0{salt}".encode(), digest_size=_NAME_BYTES).digest()
        names = []
        for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
            ids = struct.pack(f"<{block_tokens}I", *token_ids[start : start + block_tokens])
            name = hashlib.blake2b(name + ids, digest_size=_NAME_BYTES).digest()
            names.append(name.hex())
        return cls(tuple(names), block_tokens, len(token_ids))

    def cached_tokens(self, num_blocks: int) -> int:
        """Return the number of prompt tokens that are not computed if the first `num_blocks` blocks are cached. The
        last token of the prompt is always computed, because its output is the first generated token."""
        most = (self.num_tokens - 1) // self.block_tokens
        return min(num_blocks, most) * self.block_tokens

    def cached(self, num_tokens: int) -> tuple[str, ...]:
        """Return the names of the blocks that hold the first `num_tokens` tokens. `num_tokens` must be a multiple of
        the block size."""
        assert num_tokens % self.block_tokens == 0, f"{num_tokens} tokens are not a multiple of {self.block_tokens}"
        return self.names[: num_tokens // self.block_tokens]

    def kept(self, num_tokens: int) -> tuple[str, ...]:
        """Return the names of all whole blocks of the prompt, except those of its first `num_tokens` tokens. If the
        first `num_tokens` tokens come from a cache, the returned blocks can be added to the cache after the prefill.
        `num_tokens` must be a multiple of the block size."""
        return self.names[len(self.cached(num_tokens)) :]
