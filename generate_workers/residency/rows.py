"""One slot's row of KV, made of parts: memories at home, which together hold all layers, and parts on the device.

A policy's row is a StoredRow with parts of its own. `steps` runs rows.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, Self

from torch import Tensor

from baton.types import KvLayout, TokenRange
from generate_workers.residency.port import KvBytes
from modeling.forward.decoder import SequenceSpan
from modeling.kv.buffers import BufferSpan, KvBuffer
from modeling.kv.memory import RowMemory
from modeling.kv.staging import StagingFrames
from modeling.kv.transfers import Transfer

MakeMemory = Callable[[KvLayout, int], RowMemory]
"""Makes memory for one row of a layout, up to a number of tokens. Raises what is in OUT_OF_MEMORY, or OSError."""


class Part(Protocol):
    """A part of a slot's row, claim after claim: KV of some layers, or what keys are chosen by."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes that are committed now."""
        ...

    def bytes_for(self, num_tokens: int) -> int:
        """Return the bytes that so many tokens take once all are written."""
        ...

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begin a claim; `num_tokens` tokens will be written for sure."""
        ...

    def copy_from(self, other: Self, num_tokens: int) -> None:
        """Copy the first `num_tokens` tokens from the same part of another row."""
        ...

    def release(self) -> None:
        """End the claim, if there is one."""
        ...


class PagedKv:
    """A Part with the KV of some layers, in memory that grows with its tokens."""

    def __init__(self, layout: KvLayout, make_memory: MakeMemory, max_tokens: int) -> None:
        """`layout`: that of these layers alone. Raises what `make_memory` raises."""
        self.layout = layout
        self.memory = make_memory(layout, max_tokens)
        self._buffer: KvBuffer | None = None

    @property
    def num_bytes(self) -> int:
        """Return the bytes that are committed now."""
        return self.memory.num_bytes

    @property
    def buffer(self) -> KvBuffer:
        """Return the present claim's buffer, with room for all its tokens; only committed ones may be touched."""
        assert self._buffer is not None, "the slot is not claimed"
        return self._buffer

    def bytes_for(self, num_tokens: int) -> int:
        """Return the bytes that so many tokens take once all are written."""
        return self.memory.bytes_for(num_tokens)

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begin a claim; `num_tokens` tokens will be written for sure."""
        self.memory.expect(num_tokens)
        tokens = TokenRange(0, capacity_tokens)
        data_LS2GH = self.memory.data_LS2GH[:, :capacity_tokens]
        self._buffer = KvBuffer.of(self.layout, tokens, data_LS2GH, self.memory.access)

    def write(self, layer: int, tokens: TokenRange, data: memoryview) -> Transfer:
        """Begin to copy pushed KV into place, committing its memory. `layer`: counted from the first of these."""
        self.memory.commit(tokens, layer)
        return self.buffer.begin_write(layer, tokens, data)

    def copy_from(self, other: "PagedKv", num_tokens: int) -> None:
        """Copy the first `num_tokens` tokens of another row."""
        tokens = TokenRange(0, num_tokens)
        self.memory.commit(tokens)
        self.buffer.copy_from(other.buffer, tokens)

    def release(self) -> None:
        """End the claim, if there is one."""
        self._buffer = None
        self.memory.release()


class Area(PagedKv):
    """A Part on the device in which layers take turns: each step fills it anew."""

    def commit(self, tokens: TokenRange) -> None:
        """Commit memory for a step whose new tokens are `tokens`, and for all tokens before."""
        self.memory.commit(TokenRange(0, tokens.end))

    def copy_from(self, other: PagedKv, num_tokens: int) -> None:
        """Do nothing: between steps an area holds no KV."""


class StoredRow:
    """A RowKv of parts. Its KV lies at home as it is, unless a subclass says otherwise."""

    reads_home = False
    """Whether attention reads keys and values at home, which counts as if they crossed the link."""

    def __init__(self, home: Sequence[PagedKv], device: Sequence[Part]) -> None:
        """`home`: memories that together hold all layers, in order. `device`: what a step needs there. May overlap."""
        self._home, self._device = home, device
        self._parts: Sequence[Part] = [*home, *(part for part in device if part not in home)]
        self._homes = [(kv, layer) for kv in home for layer in range(kv.layout.num_layers)]
        """Where each layer of the model lies: in a memory of `home`, and its number there."""

    @property
    def tokens(self) -> TokenRange:
        """Return the tokens that the present claim may hold."""
        return self._home[0].buffer.tokens

    @property
    def num_bytes(self) -> KvBytes:
        """Return the bytes that are committed now."""
        return KvBytes(sum(part.num_bytes for part in self._home), sum(part.num_bytes for part in self._device))

    @property
    def frames(self) -> StagingFrames | None:
        """Return the frames of the device that some layers lie on; None: all lie at home."""
        return next((frames for kv in self._home if (frames := kv.memory.access.frames) is not None), None)

    def bytes_for(self, num_tokens: int) -> KvBytes:
        """Return the bytes that so many tokens take once all are written."""
        home, device = (sum(part.bytes_for(num_tokens) for part in parts) for parts in (self._home, self._device))
        return KvBytes(home, device)

    def num_kept(self, num_tokens: int) -> int:
        """Return the keys that a layer keeps of so many tokens while no step runs: all, unless the row evicts."""
        return num_tokens

    def chooses(self, tokens: TokenRange) -> bool:
        """Return whether the new tokens of a step attend to some keys only, in a policy that chooses."""
        return len(tokens) == 1

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begin a claim; `num_tokens` tokens will be written for sure. When it fails, nothing is held."""
        try:
            for part in self._parts:
                part.open(num_tokens, capacity_tokens)
        except BaseException:
            self.release()
            raise

    def commit(self, tokens: TokenRange) -> None:
        """Commit memory for `tokens`, which a step is about to write."""
        for kv in self._home:
            kv.memory.commit(tokens)

    def span(self, tokens: TokenRange) -> SequenceSpan:
        """Return the span of a step whose new tokens are `tokens`."""
        (kv,) = self._home
        return BufferSpan(kv.buffer, tokens)

    def kv(self, layer: int, tokens: TokenRange) -> Tensor:
        """Return a view `[T, 2, G, H]` of `tokens` at home."""
        kv, at = self._homes[layer]
        return kv.buffer.span(at, tokens)

    def write(self, layer: int, tokens: TokenRange, data: memoryview) -> Transfer:
        """Begin to copy pushed KV home, committing its memory."""
        kv, at = self._homes[layer]
        written = kv.write(at, tokens, data)  # what rows take in of pushed KV is that of layers at home
        self.take_in(layer, tokens, kv.buffer.span(at, tokens))
        return written

    def take_in(self, layer: int, tokens: TokenRange, kv_T2GH: Tensor) -> None:
        """Take note of KV that was pushed, or that a longer span of a step made. Here there is nothing to note."""

    def export(self, layer: int, tokens: TokenRange) -> memoryview:
        """Return the bytes of `tokens`, which were written."""
        kv, at = self._homes[layer]
        return kv.buffer.export(at, tokens)

    def copy_from(self, other: Self, num_tokens: int) -> None:
        """Copy the first `num_tokens` tokens of another row of the policy."""
        for mine, theirs in zip(self._parts, other._parts, strict=True):
            mine.copy_from(theirs, num_tokens)

    def release(self) -> None:
        """End the claim, if there is one."""
        for part in self._parts:
            part.release()


class AreaRow(StoredRow):
    """A StoredRow whose steps run over an area on the device."""

    area: Area

    def commit(self, tokens: TokenRange) -> None:
        """Commit memory for `tokens` at home, and for all tokens up to them in the area."""
        super().commit(tokens)
        self.area.commit(tokens)

    def span(self, tokens: TokenRange) -> SequenceSpan:
        """Return a span over the area."""
        return BufferSpan(self.area.buffer, tokens)
