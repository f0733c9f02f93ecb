"""Names of prompt blocks: a name stands for the tokens of a block and for all tokens before it.

The name of a prompt's block is the hash of the block's token ids and of the previous block's name. Two prompts
therefore share exactly the names of the whole blocks of their common beginning. The first name depends on how KV is
stored (other weights make other KV) and on a salt: prompts with different salts share no names. Names stay the same
across restarts.

The orchestrator names the blocks of prompts; a generation group names those of its answers (DESIGN.md, section 5).
Pure.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

_NAME_BYTES = 16


@dataclass(frozen=True)
class BlockNaming:
    """Parameters that block names depend on, in addition to the tokens and the layout of KV."""

    block_tokens: int
    salt: str = ""


@dataclass(frozen=True)
class PromptBlocks:
    """The whole blocks of one prompt, by name."""

    names: tuple[str, ...]
    block_tokens: int
    num_tokens: int
    """Tokens of the prompt, those after the last whole block included."""

    @classmethod
    def of(cls, token_ids: Sequence[int], block_tokens: int, layout_fingerprint: str, salt: str = "") -> "PromptBlocks":
        """Return the blocks of the prompt `token_ids`, in a cluster whose KV layout has this fingerprint. Takes tenths
        of a millisecond for thousands of tokens."""
        name = hashlib.blake2b(f"{layout_fingerprint}\0{salt}".encode(), digest_size=_NAME_BYTES).digest()
        names = []
        for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
            ids = struct.pack(f"<{block_tokens}I", *token_ids[start : start + block_tokens])
            name = hashlib.blake2b(name + ids, digest_size=_NAME_BYTES).digest()
            names.append(name.hex())
        return cls(tuple(names), block_tokens, len(token_ids))

    def cached_tokens(self, num_blocks: int) -> int:
        """Return the number of prompt tokens that `num_blocks` cached blocks save. The prompt's last token is always
        computed, because it yields the first output."""
        most = (self.num_tokens - 1) // self.block_tokens
        return min(num_blocks, most) * self.block_tokens

    def cached(self, num_tokens: int) -> tuple[str, ...]:
        """Return the names of the blocks that hold the first `num_tokens` tokens, a whole number of blocks."""
        assert num_tokens % self.block_tokens == 0, f"{num_tokens} tokens are not a multiple of {self.block_tokens}"
        return self.names[: num_tokens // self.block_tokens]

    def kept(self, num_tokens: int) -> tuple[str, ...]:
        """Return the names of the blocks after the first `num_tokens` tokens, a whole number of blocks."""
        return self.names[len(self.cached(num_tokens)) :]
