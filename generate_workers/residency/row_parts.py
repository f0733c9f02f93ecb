"""Memory of one slot, which consists of parts: KV of all layers, and further parts on the device.

Each slot of a policy has one StoredRow object, or an object of a subclass, with the parts that the policy needs.
`residency.steps` runs steps over these objects. `home` is the memory in which KV is stored between steps. `device` is
the memory of the device. If the device stores KV between steps, this KV counts both as `home` and as `device`.
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
OUT_OF_MEMORY, or OSError, if the memory cannot be allocated."""


class RowPart(Protocol):
    """Part of a slot's memory: the KV of some layers, or an index for selecting keys. The sequences that use the slot
    use the part one after another."""

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes of memory that are committed now."""
        ...

    def bytes_for(self, num_tokens: int) -> int:
        """Return the number of bytes of memory that the part takes when all `num_tokens` tokens of a sequence are
        written."""
        ...

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begin the use of the slot by a new sequence. `num_tokens`: number of tokens that are certain to be written.
        `capacity_tokens`: maximum number of tokens."""
        ...

    def copy_from(self, other: Self, num_tokens: int) -> None:
        """Copy the first `num_tokens` tokens from the same part of another slot."""
        ...

    def release(self) -> None:
        """End the current sequence's use of the slot, if there is one, and release its memory."""
        ...


class PagedKv:
    """Memory for the KV of some layers, which grows with the number of tokens; a RowPart (part of a slot's memory)."""

    def __init__(self, layout: KvLayout, make_memory: MakeMemory, max_tokens: int) -> None:
        """`layout`: layout of only those layers whose KV this part stores. `max_tokens`: maximum number of tokens of a
        sequence. Raises the errors of `make_memory`."""
        self.layout = layout
        self.memory = make_memory(layout, max_tokens)
        self._buffer: KvBuffer | None = None

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes of memory that are committed now."""
        return self.memory.num_bytes

    @property
    def buffer(self) -> KvBuffer:
        """Return the current sequence's buffer. It has addresses for all tokens that the sequence may have, but only
        committed tokens may be accessed."""
        assert self._buffer is not None, "the slot is not claimed"
        return self._buffer

    def bytes_for(self, num_tokens: int) -> int:
        """Return the number of bytes of memory that a sequence takes when all of its `num_tokens` tokens are
        written."""
        return self.memory.bytes_for(num_tokens)

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begin the use of the slot by a new sequence. `num_tokens`: number of tokens that are certain to be written.
        `capacity_tokens`: maximum number of tokens."""
        self.memory.expect(num_tokens)
        tokens = TokenRange(0, capacity_tokens)
        data_LS2GH = self.memory.data_LS2GH[:, :capacity_tokens]
        self._buffer = KvBuffer.of(self.layout, tokens, data_LS2GH, self.memory.access)

    def write(self, layer: int, tokens: TokenRange, data: memoryview) -> Transfer:
        """Commit memory for pushed KV, and begin to copy the KV into it. `layer`: number of the layer in this part,
        counted from 0."""
        self.memory.commit(tokens, layer)
        return self.buffer.begin_write(layer, tokens, data)

    def copy_from(self, other: "PagedKv", num_tokens: int) -> None:
        """Copy the KV of the first `num_tokens` tokens of another slot."""
        tokens = TokenRange(0, num_tokens)
        self.memory.commit(tokens)
        self.buffer.copy_from(other.buffer, tokens)

    def release(self) -> None:
        """End the current sequence's use of the slot, if there is one, and release its memory."""
        self._buffer = None
        self.memory.release()


class Area(PagedKv):
    """Device memory that the layers of a step use one after another; a RowPart (part of a slot's memory). It contains
    no KV between steps."""

    def commit(self, tokens: TokenRange) -> None:
        """Commit memory for the KV of all tokens up to the end of `tokens`, the new tokens of a step."""
        self.memory.commit(TokenRange(0, tokens.end))

    def copy_from(self, other: PagedKv, num_tokens: int) -> None:
        """Do nothing: an area (device memory that layers use one after another) contains no KV between steps."""


class StoredRow:
    """Memory of one slot's KV, which consists of RowParts. Implements RowKv. This class stores KV unchanged. Subclasses
    may pack it."""

    reads_home = False
    """True if attention reads KV directly in host memory. The bytes that attention reads then count as bytes that cross
    the link between host and device."""

    def __init__(self, home: Sequence[PagedKv], device: Sequence[RowPart]) -> None:
        """`home`: parts that together store the KV of all layers between steps, in the order of layers. `device`: parts
        on the device. A part that stores KV on the device is in both."""
        self._home, self._device = home, device
        self._parts: Sequence[RowPart] = [*home, *(part for part in device if part not in home)]
        self._homes = [(kv, layer) for kv in home for layer in range(kv.layout.num_layers)]
        """Location of the stored KV of each layer of the model: the PagedKv that stores the layer, and the layer's
        index within it."""

    @property
    def tokens(self) -> TokenRange:
        """Return the range of token positions that the slot's current sequence may use."""
        return self._home[0].buffer.tokens

    @property
    def num_bytes(self) -> KvBytes:
        """Return the number of bytes of memory that are committed now."""
        return KvBytes(sum(part.num_bytes for part in self._home), sum(part.num_bytes for part in self._device))

    @property
    def frames(self) -> StagingFrames | None:
        """Return the staging frames (buffers in host memory) through which pushed KV is copied to a device. None: no
        layer is stored on a device that has frames, and all KV is written directly to its final memory."""
        return next((frames for kv in self._home if (frames := kv.memory.access.frames) is not None), None)

    def bytes_for(self, num_tokens: int) -> KvBytes:
        """Return the number of bytes of memory that a sequence takes when all of its `num_tokens` tokens are
        written."""
        home, device = (sum(part.bytes_for(num_tokens) for part in parts) for parts in (self._home, self._device))
        return KvBytes(home, device)

    def num_kept(self, num_tokens: int) -> int:
        """Return the number of keys per layer that are kept between steps for a sequence of `num_tokens` tokens. This
        is `num_tokens`, unless the policy evicts tokens."""
        return num_tokens

    def chooses(self, tokens: TokenRange) -> bool:
        """Return True if a sequence with the new tokens `tokens` attends only to selected keys. This is the case if
        `tokens` is a single token. The result has a meaning only for policies that select keys."""
        return len(tokens) == 1

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begin the use of the slot by a new sequence. `num_tokens`: number of tokens that are certain to be written.
        `capacity_tokens`: maximum number of tokens. If this raises, no memory stays allocated."""
        try:
            for part in self._parts:
                part.open(num_tokens, capacity_tokens)
        except BaseException:
            self.release()
            raise

    def commit(self, tokens: TokenRange) -> None:
        """Commit memory for the KV of `tokens`, which a step is about to write."""
        for kv in self._home:
            kv.memory.commit(tokens)

    def span(self, tokens: TokenRange) -> SequenceSpan:
        """Return the SequenceSpan of a step that runs the new tokens `tokens`: the KV that they attend to, and memory
        for their own KV."""
        (kv,) = self._home
        return BufferSpan(kv.buffer, tokens)

    def kv(self, layer: int, tokens: TokenRange) -> Tensor:
        """Return a view of the stored KV of `tokens` in a layer, `[T, 2, G, H]`."""
        kv, at = self._homes[layer]
        return kv.buffer.span(at, tokens)

    def write(self, layer: int, tokens: TokenRange, data: memoryview) -> Transfer:
        """Commit memory for pushed KV, and begin to copy the KV into it."""
        kv, at = self._homes[layer]
        written = kv.write(at, tokens, data)  # `take_in` uses only layers in host memory, whose write is complete
        self.take_in(layer, tokens, kv.buffer.span(at, tokens))
        return written

    def take_in(self, layer: int, tokens: TokenRange, kv_T2GH: Tensor) -> None:
        """Add the KV of `tokens`, which was pushed or prefilled, to the policy's index for selecting keys. Does nothing
        in this class, which has no index."""

    def export(self, layer: int, tokens: TokenRange) -> memoryview:
        """Return the KV of `tokens` in a layer as bytes. The KV must have been written."""
        kv, at = self._homes[layer]
        return kv.buffer.export(at, tokens)

    def copy_from(self, other: Self, num_tokens: int) -> None:
        """Copy the KV of the first `num_tokens` tokens of another slot's sequence."""
        for mine, theirs in zip(self._parts, other._parts, strict=True):
            mine.copy_from(theirs, num_tokens)

    def release(self) -> None:
        """End the current sequence's use of the slot, if there is one, and release its memory."""
        for part in self._parts:
            part.release()


class AreaRow(StoredRow):
    """StoredRow with an area: device memory that holds the KV of a few layers at a time. Attention reads the area
    instead of the stored KV."""

    area: Area

    def commit(self, tokens: TokenRange) -> None:
        """Commit memory for `tokens` where their KV is stored, and device memory for the KV that attention reads: that
        of `tokens` and of all tokens before them, in the area (a device buffer that layers use one after another)."""
        super().commit(tokens)
        self.area.commit(tokens)

    def span(self, tokens: TokenRange) -> SequenceSpan:
        """Return the SequenceSpan of a step that runs the new tokens `tokens`: the KV that they attend to, and memory
        for their own KV. Both are in the area (device memory that layers use one after another)."""
        return BufferSpan(self.area.buffer, tokens)
