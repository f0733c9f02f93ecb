"""KV of one slot's sequence, which consists of parts: storage for all layers, and parts on the device. A policy's slot
is a StoredRow (or a subclass) with the parts that the policy needs. `steps` runs steps over them. `home` is the memory
where KV is stored between steps: host memory, or device memory that counts as both (`port`).
"""

from collections.abc import Callable, Sequence
from typing import Protocol, Self

from torch import Tensor

from baton.modeling.forward.decoder import SequenceSpan
from baton.modeling.kv.buffers import BufferSpan, KvBuffer
from baton.modeling.kv.row_memory import RowMemory
from baton.modeling.kv.staging import StagingFrames
from baton.modeling.kv.transfers import Transfer
from baton.types import KvLayout, TokenRange
from generate_workers.residency.port import KvBytes

MakeMemory = Callable[[KvLayout, int], RowMemory]
"""Function that takes a layout and a maximum number of tokens, and returns memory for one slot. Raises an error of
OUT_OF_MEMORY, or OSError."""


class RowPart(Protocol):
    """Part of a slot's memory: KV of some layers, or an index for selecting keys. It is reused by the slot's claims,
    one after another."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes that are committed now."""
        ...

    def bytes_for(self, num_tokens: int) -> int:
        """Return the bytes that `num_tokens` tokens take once all are written."""
        ...

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begin a claim. `num_tokens`: tokens that are certain to be written."""
        ...

    def copy_from(self, other: Self, num_tokens: int) -> None:
        """Copy the first `num_tokens` tokens from the same part of another slot."""
        ...

    def release(self) -> None:
        """End the claim, if one exists."""
        ...


class PagedKv:
    """RowPart with the KV of some layers, in memory that grows with the number of tokens."""

    def __init__(self, layout: KvLayout, make_memory: MakeMemory, max_tokens: int) -> None:
        """`layout`: layout of only these layers. Raises the errors of `make_memory`."""
        self.layout = layout
        self.memory = make_memory(layout, max_tokens)
        self._buffer: KvBuffer | None = None

    @property
    def num_bytes(self) -> int:
        """Return the bytes that are committed now."""
        return self.memory.num_bytes

    @property
    def buffer(self) -> KvBuffer:
        """Return the current claim's buffer, which has room for all tokens of the claim. Only committed tokens may be
        accessed."""
        assert self._buffer is not None, "the slot is not claimed"
        return self._buffer

    def bytes_for(self, num_tokens: int) -> int:
        """Return the bytes that `num_tokens` tokens take once all are written."""
        return self.memory.bytes_for(num_tokens)

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begin a claim. `num_tokens`: tokens that are certain to be written."""
        self.memory.expect(num_tokens)
        tokens = TokenRange(0, capacity_tokens)
        data_LS2GH = self.memory.data_LS2GH[:, :capacity_tokens]
        self._buffer = KvBuffer.of(self.layout, tokens, data_LS2GH, self.memory.access)

    def write(self, layer: int, tokens: TokenRange, data: memoryview) -> Transfer:
        """Commit memory for pushed KV, and begin to copy it into place. `layer`: number of the layer in this part,
        counted from 0."""
        self.memory.commit(tokens, layer)
        return self.buffer.begin_write(layer, tokens, data)

    def copy_from(self, other: "PagedKv", num_tokens: int) -> None:
        """Copy the first `num_tokens` tokens of another slot."""
        tokens = TokenRange(0, num_tokens)
        self.memory.commit(tokens)
        self.buffer.copy_from(other.buffer, tokens)

    def release(self) -> None:
        """End the claim, if one exists."""
        self._buffer = None
        self.memory.release()


class Area(PagedKv):
    """RowPart on the device that all layers of a step use, one after another. It holds no KV between steps."""

    def commit(self, tokens: TokenRange) -> None:
        """Commit memory for a step whose new tokens are `tokens`, and for all tokens before them."""
        self.memory.commit(TokenRange(0, tokens.end))

    def copy_from(self, other: PagedKv, num_tokens: int) -> None:
        """Do nothing: between steps an area holds no KV."""


class StoredRow:
    """RowKv that consists of RowParts. KV is stored unchanged, except in subclasses that pack it."""

    reads_home = False
    """True if attention reads KV directly in host memory; the bytes read then count as link bytes."""

    def __init__(self, home: Sequence[PagedKv], device: Sequence[RowPart]) -> None:
        """`home`: parts that store all layers between steps, in the order of layers. `device`: parts on the device. A
        part may be in both."""
        self._home, self._device = home, device
        self._parts: Sequence[RowPart] = [*home, *(part for part in device if part not in home)]
        self._homes = [(kv, layer) for kv in home for layer in range(kv.layout.num_layers)]
        """Part of `home` that stores each layer of the model, and the layer's number in that part."""

    @property
    def tokens(self) -> TokenRange:
        """Return the range of tokens that the current claim may hold."""
        return self._home[0].buffer.tokens

    @property
    def num_bytes(self) -> KvBytes:
        """Return the bytes that are committed now."""
        return KvBytes(sum(part.num_bytes for part in self._home), sum(part.num_bytes for part in self._device))

    @property
    def frames(self) -> StagingFrames | None:
        """Return the device's frames if some layers are stored on a device with frames. None: all KV is written in
        place."""
        return next((frames for kv in self._home if (frames := kv.memory.access.frames) is not None), None)

    def bytes_for(self, num_tokens: int) -> KvBytes:
        """Return the bytes that `num_tokens` tokens take once all are written."""
        home, device = (sum(part.bytes_for(num_tokens) for part in parts) for parts in (self._home, self._device))
        return KvBytes(home, device)

    def num_kept(self, num_tokens: int) -> int:
        """Return the number of keys that a layer keeps between steps for a sequence of `num_tokens` tokens:
        `num_tokens`, unless tokens are evicted."""
        return num_tokens

    def chooses(self, tokens: TokenRange) -> bool:
        """Return whether a step with these new tokens attends only to selected keys, in a policy that selects keys."""
        return len(tokens) == 1

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begin a claim. `num_tokens`: tokens that are certain to be written. If it raises, no memory is held."""
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
        """Return a view `[T, 2, G, H]` of the stored KV of `tokens`."""
        kv, at = self._homes[layer]
        return kv.buffer.span(at, tokens)

    def write(self, layer: int, tokens: TokenRange, data: memoryview) -> Transfer:
        """Commit memory for pushed KV, and begin to copy it to storage."""
        kv, at = self._homes[layer]
        written = kv.write(at, tokens, data)  # `take_in` uses only layers in host memory, whose write is complete
        self.take_in(layer, tokens, kv.buffer.span(at, tokens))
        return written

    def take_in(self, layer: int, tokens: TokenRange, kv_T2GH: Tensor) -> None:
        """Update the policy's index with KV that was pushed or prefilled. Does nothing in this class."""

    def export(self, layer: int, tokens: TokenRange) -> memoryview:
        """Return the bytes of `tokens`, which must have been written."""
        kv, at = self._homes[layer]
        return kv.buffer.export(at, tokens)

    def copy_from(self, other: Self, num_tokens: int) -> None:
        """Copy the first `num_tokens` tokens of another slot's sequence."""
        for mine, theirs in zip(self._parts, other._parts, strict=True):
            mine.copy_from(theirs, num_tokens)

    def release(self) -> None:
        """End the claim, if one exists."""
        for part in self._parts:
            part.release()


class AreaRow(StoredRow):
    """StoredRow whose steps run over an area on the device."""

    area: Area

    def commit(self, tokens: TokenRange) -> None:
        """Commit memory for `tokens` in storage, and in the area for `tokens` and all tokens before them."""
        super().commit(tokens)
        self.area.commit(tokens)

    def span(self, tokens: TokenRange) -> SequenceSpan:
        """Return the span of a step over the area."""
        return BufferSpan(self.area.buffer, tokens)
