"""One slot's home memory: the part that the policies' rows share."""

from collections.abc import Callable

from baton.types import KvLayout, TokenRange
from modeling.kv.buffers import KvBuffer
from modeling.kv.memory import RowMemory

MakeMemory = Callable[[KvLayout, int], RowMemory]
"""Makes memory for one row of a layout, up to a number of tokens. Raises what is in OUT_OF_MEMORY."""


class PagedRow:
    """The KV of a slot, claim after claim, in memory that grows with its tokens."""

    def __init__(self, layout: KvLayout, memory: RowMemory) -> None:
        self.memory = memory
        self._layout = layout
        self._buffer: KvBuffer | None = None

    @property
    def buffer(self) -> KvBuffer:
        """Return the present claim's buffer, with room for all its tokens; only committed ones may be touched."""
        assert self._buffer is not None, "the slot is not claimed"
        return self._buffer

    @property
    def tokens(self) -> TokenRange:
        """Return the tokens that the present claim may hold."""
        return self.buffer.tokens

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begin a claim; `num_tokens` tokens will be written for sure."""
        self.memory.expect(num_tokens)
        tokens = TokenRange(0, capacity_tokens)
        self._buffer = KvBuffer.of(self._layout, tokens, self.memory.data_LS2GH[:, :capacity_tokens])

    def write(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        """Copy pushed KV into place, committing its memory."""
        self.memory.commit(tokens, layer)
        self.buffer.write(layer, tokens, data)

    def export(self, layer: int, tokens: TokenRange) -> memoryview:
        """Return the bytes of `tokens`, which were written."""
        return self.buffer.export(layer, tokens)

    def copy_from(self, other: "PagedRow", num_tokens: int) -> None:
        """Copy another row's first `num_tokens` tokens."""
        tokens = TokenRange(0, num_tokens)
        self.memory.commit(tokens)
        self.buffer.copy_from(other.buffer, tokens)

    def release(self) -> None:
        """End the claim, if there is one."""
        self._buffer = None
        self.memory.release()
