"""One slot's home memory: what the policies' rows have in common."""

from collections.abc import Callable

from baton.types import KvLayout, TokenRange
from modeling.kv.buffers import KvBuffer
from modeling.kv.memory import RowMemory

MakeMemory = Callable[[KvLayout, int], RowMemory]
"""Memory for one row of a layout, up to a number of tokens. Raises what is in OUT_OF_MEMORY."""


class PagedRow:
    """The KV of a slot, claim after claim, in memory that grows with it."""

    def __init__(self, layout: KvLayout, memory: RowMemory) -> None:
        self.memory = memory
        self._layout = layout
        self._buffer: KvBuffer | None = None

    @property
    def buffer(self) -> KvBuffer:
        """Of the present claim: room for all its tokens; only those committed may be touched."""
        assert self._buffer is not None, "the slot is not claimed"
        return self._buffer

    @property
    def tokens(self) -> TokenRange:
        """That the present claim may hold."""
        return self.buffer.tokens

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begins a claim; `num_tokens` will be written for sure."""
        self.memory.expect(num_tokens)
        tokens = TokenRange(0, capacity_tokens)
        self._buffer = KvBuffer.of(self._layout, tokens, self.memory.data_LS2GH[:, :capacity_tokens])

    def write(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        """Copies pushed KV into place."""
        self.memory.commit(tokens, layer)
        self.buffer.write(layer, tokens, data)

    def export(self, layer: int, tokens: TokenRange) -> memoryview:
        """The bytes of `tokens`, which were written."""
        return self.buffer.export(layer, tokens)

    def copy_from(self, other: "PagedRow", num_tokens: int) -> None:
        """Takes another row's first tokens."""
        tokens = TokenRange(0, num_tokens)
        self.memory.commit(tokens)
        self.buffer.copy_from(other.buffer, tokens)

    def release(self) -> None:
        """Ends the claim, if there is one."""
        self._buffer = None
        self.memory.release()
