"""Blocks of prompts by name: a name says which tokens a block holds, and all that come before them.

The name of a prompt's block is the hash of the block's token ids and of the name before it, so that two prompts have as
many names in common as they have whole blocks, and no two others. The first name comes from how KV is stored (other
weights make other KV) and from a salt: who has another salt shares nothing. Names are equal in all processes and lives.

The orchestrator names a prompt's blocks (step 3 of a request's way), a generation group those of its answers (step 9;
DESIGN.md, sections 4 and 5). Pure.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

_NAME_BYTES = 16


@dataclass(frozen=True)
class BlockNaming:
    """What names rest on, beside tokens and how their KV is stored."""

    block_tokens: int
    salt: str = ""


@dataclass(frozen=True)
class PromptBlocks:
    """The whole blocks of one prompt."""

    names: tuple[str, ...]
    block_tokens: int
    num_tokens: int
    """Of the prompt, those behind the last whole block included."""

    @classmethod
    def of(cls, token_ids: Sequence[int], block_tokens: int, layout_fingerprint: str, salt: str = "") -> "PromptBlocks":
        """A prompt's, in a cluster that stores KV in that layout. Takes tenths of a millisecond for thousands of
        tokens."""
        name = hashlib.blake2b(f"{layout_fingerprint}\0{salt}".encode(), digest_size=_NAME_BYTES).digest()
        names = []
        for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
            ids = struct.pack(f"<{block_tokens}I", *token_ids[start : start + block_tokens])
            name = hashlib.blake2b(name + ids, digest_size=_NAME_BYTES).digest()
            names.append(name.hex())
        return cls(tuple(names), block_tokens, len(token_ids))

    def cached_tokens(self, num_blocks: int) -> int:
        """Tokens that need not be computed where the first `num_blocks` blocks are cached: the first token of the
        output comes from the last one of the prompt, which somebody computes."""
        most = (self.num_tokens - 1) // self.block_tokens
        return min(num_blocks, most) * self.block_tokens

    def cached(self, num_tokens: int) -> tuple[str, ...]:
        """The names of the blocks that are those first tokens."""
        assert num_tokens % self.block_tokens == 0, f"{num_tokens} tokens are no whole blocks of {self.block_tokens}"
        return self.names[: num_tokens // self.block_tokens]

    def kept(self, num_tokens: int) -> tuple[str, ...]:
        """The names of the blocks after them."""
        return self.names[len(self.cached(num_tokens)) :]
