"""KV memory: token-major buffers, views for attention, and raw bytes for the transport.

Both worker roles keep KV in these buffers. `baton.modeling.forward.attention` reads their views, and `transport` moves
their bytes. A buffer is in host memory, whose bytes the host reads and writes in place, or in a device's memory, which
the host reaches over a link (`baton.modeling.device`). S cached tokens, G kv heads, H head dim, L layers.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

from baton.modeling.kv.arena import WrongMemoryError, require_home
from baton.modeling.kv.staging import StagingFrames
from baton.modeling.kv.transfers import DoneTransfer, Transfer
from baton.types import KvLayout, TokenRange

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""torch's dtype for each dtype name of KvLayout."""

OUT_OF_MEMORY = (MemoryError, RuntimeError)
"""Errors that numpy and torch raise when a buffer's memory cannot be allocated."""


Writes = Sequence[tuple[Tensor, memoryview]]
"""Pairs `(to, data)`: a contiguous tensor, and exactly its bytes in host memory."""


class HostAccess(Protocol):
    """The host's access to the bytes of a buffer's memory. Any thread may use it."""

    @property
    def frames(self) -> StagingFrames | None:
        """Return the staging frames from which `write` copies directly. None: it copies directly from any memory."""

    def read(self, sources: Sequence[Tensor]) -> memoryview:
        """Return the bytes of contiguous tensors, one after the other. The result is the memory itself for a single
        tensor in host memory, else one copy of all tensors. Blocks."""

    def write(self, writes: Writes) -> Transfer:
        """Copy to host memory, without the GIL, or begin to copy to a device's memory. Bytes in frames must not change
        before the transfer is done. Other bytes are not read any more once this returns."""


class HomeAccess:
    """HostAccess to host memory."""

    frames = None

    def read(self, sources: Sequence[Tensor]) -> memoryview:
        """Return the memory itself for one tensor, or a copy of several."""
        views = [byte_view(source) for source in sources]
        return views[0] if len(views) == 1 else memoryview(b"".join(views))

    def write(self, writes: Writes) -> Transfer:
        """Copy in place, with numpy: gRPC's memory is read-only, which torch does not accept."""
        for to, data in writes:
            np.copyto(np.asarray(byte_view(to)), np.frombuffer(data, np.uint8))
        return DoneTransfer()


HOME = HomeAccess()


@dataclass(frozen=True)
class KvRows:
    """Keys and values of consecutive tokens in one layer, as attention reads them. Views, never copies."""

    k_SGH: Tensor
    v_SGH: Tensor
    first_position: int
    """Absolute position of row 0."""

    @property
    def end_position(self) -> int:
        return self.first_position + self.k_SGH.shape[0]

    def slice(self, start: int, end: int) -> "KvRows":
        """Return the rows of absolute positions [start, end), clamped to the rows that exist."""
        low = max(start - self.first_position, 0)
        high = max(min(end, self.end_position) - self.first_position, low)
        if low == 0 and high == self.k_SGH.shape[0]:
            return self
        return KvRows(self.k_SGH[low:high], self.v_SGH[low:high], self.first_position + low)


class KvBuffer:
    """KV of the tokens `tokens` of one sequence in all layers: one tensor `[L, S, 2, G, H]`.

    Memory is allocated when the buffer is made, unless it is made `over` existing memory, and freed with its last view.
    On the CPU a large buffer's pages are committed only when written. Not thread-safe by itself: concurrent writers
    must write different token ranges, and a range may be read only after it was written.
    """

    access: HostAccess = HOME

    def __init__(self, layout: KvLayout, tokens: TokenRange) -> None:
        """Allocate the buffer in host memory. Raises an error in OUT_OF_MEMORY."""
        self.layout = layout
        self.tokens = tokens
        self.data = _empty(_shape(layout, tokens), TORCH_DTYPES[layout.dtype])

    @classmethod
    def over(cls, layout: KvLayout, tokens: TokenRange, memory: memoryview) -> Self:
        """Return a buffer whose data is `memory`, which is writable, has the buffer's size, and is held until the last
        view is freed."""
        assert memory.nbytes == len(tokens) * layout.token_bytes, f"{memory.nbytes} bytes for {tokens}"
        data = torch.frombuffer(memory, dtype=TORCH_DTYPES[layout.dtype]).view(_shape(layout, tokens))
        return cls.of(layout, tokens, data)

    @classmethod
    def of(cls, layout: KvLayout, tokens: TokenRange, data: Tensor, access: HostAccess = HOME) -> Self:
        """Return a buffer whose data is `data`, `[L, S, 2, G, H]`, in memory that `access` reaches. Each layer is
        contiguous."""
        assert data.shape == _shape(layout, tokens), f"{tuple(data.shape)} for {tokens}"
        self = cls.__new__(cls)
        self.layout = layout
        self.tokens = tokens
        self.data = data
        self.access = access
        return self

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def span(self, layer: int, tokens: TokenRange) -> Tensor:
        """Return a contiguous view `[len(tokens), 2, G, H]` of `tokens` in `layer`."""
        assert self.tokens.start <= tokens.start, f"{tokens} outside {self.tokens}"
        assert tokens.end <= self.tokens.end, f"{tokens} outside {self.tokens}"
        return self.data[layer, tokens.start - self.tokens.start : tokens.end - self.tokens.start]

    def rows(self, layer: int, tokens: TokenRange) -> KvRows:
        """Return views of K and V of `tokens` in `layer`, as attention reads them."""
        span = self.span(layer, tokens)
        return KvRows(span[:, 0], span[:, 1], tokens.start)

    def export(self, layer: int, tokens: TokenRange) -> memoryview:
        """Return the bytes of `tokens` in `layer`: a view of host memory, or a copy of a device's memory. Blocks."""
        return self.access.read([self.span(layer, tokens)])

    def write(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        """Copy `data` (exactly the range's bytes) into place, and return when that is done."""
        self.begin_write(layer, tokens, data).result()

    def begin_write(self, layer: int, tokens: TokenRange, data: memoryview) -> Transfer:
        """Begin to copy `data` (exactly the range's bytes) into place, by HostAccess.write."""
        assert data.nbytes == len(tokens) * self.layout.row_bytes, f"{data.nbytes} bytes for {tokens}"
        return self.access.write([(self.span(layer, tokens), data)])

    def copy_from(self, other: "KvBuffer", tokens: TokenRange) -> None:
        """Copy `tokens` of all layers from another buffer of the same layout and memory."""
        for layer in range(self.layout.num_layers):
            self.span(layer, tokens).copy_(other.span(layer, tokens))


MakeBuffer = Callable[[KvLayout, TokenRange], KvBuffer]


class LayerBuffers:
    """KV of the tokens `tokens` of one sequence, in the layers that are in use.

    A layer has memory from the first call for it until it is released. The next layer reuses released memory, so the
    memory never exceeds that of the layers that were in use at the same time. Not thread-safe.
    """

    def __init__(self, layout: KvLayout, tokens: TokenRange, make_buffer: MakeBuffer = KvBuffer) -> None:
        self._layout = dataclasses.replace(layout, num_layers=1)
        self._tokens = tokens
        self._make_buffer = make_buffer
        self._held: dict[int, KvBuffer] = {}
        self._free: list[KvBuffer] = []

    def span(self, layer: int, tokens: TokenRange) -> Tensor:
        """Return a contiguous view `[len(tokens), 2, G, H]` of a layer, which is allocated if it has no memory yet.
        Raises an error in OUT_OF_MEMORY."""
        return self._buffer(layer).span(0, tokens)

    def rows(self, layer: int, tokens: TokenRange) -> KvRows:
        """Return views of K and V of `tokens` in `layer`, as attention reads them."""
        return self._buffer(layer).rows(0, tokens)

    def release(self, layer: int) -> None:
        """Free a layer's memory for other layers. The layer must have memory, and its views must be out of use."""
        self._free.append(self._held.pop(layer))

    def drop(self) -> None:
        """Free all memory. All views of it must be out of use."""
        self._held.clear()
        self._free.clear()

    def _buffer(self, layer: int) -> KvBuffer:
        if layer not in self._held:
            self._held[layer] = self._free.pop() if self._free else self._make_buffer(self._layout, self._tokens)
        return self._held[layer]


@dataclass(frozen=True)
class BlockTable:
    """Block table of one sequence: the numbers of its pages, in order. Read when a step begins."""

    data_LPS2GH: Tensor
    """All pages of the device: P pages of S tokens in every layer. A page is contiguous within a layer."""
    pages_C: Tensor
    """Numbers of the sequence's pages, int32, in host memory. Entries after the sequence's last page are unused."""

    @property
    def page_tokens(self) -> int:
        return self.data_LPS2GH.shape[2]


@dataclass(frozen=True)
class KvPlace:
    """Location of one sequence's keys and values: contiguous in the CPU's memory, or in pages of a device's."""

    address: int
    """Address of layer 0's K of the first position; 0 with pages. A token's V follows its K, and then the next token's
    K."""
    layer_bytes: int
    """Bytes from one layer to the next."""
    num_layers: int
    """Layers that have memory there. The model's layer l is number l modulo this, unless `others` is given."""
    num_keys: int
    """Keys of the sequence, including those of new tokens."""
    num_new: int = 1
    """Keys of new tokens, which are the last ones. Each new token attends to the keys up to its own."""
    unseen: TokenRange | None = None
    """Keys, numbered from the first position's, that no new token attends to. Keys of new tokens are not among them."""
    own: int | None = None
    """Number of the new token's key, if the sequence has one new token. None: new tokens' keys are the last ones."""
    others: "KvPlace | None" = None
    """Location of the layers from number `num_layers` on. None: the same as that of the other layers."""
    table: BlockTable | None = None
    """Block table of the keys. None: the keys are contiguous in each layer."""


@dataclass(frozen=True)
class BufferSpan:
    """New tokens `tokens` of a sequence whose old and new KV is in one buffer, such as that of a generation slot. If
    the buffer has fewer layers than the model, layers share its memory: layer l is number l modulo the buffer's."""

    buffer: KvBuffer
    tokens: TokenRange

    def own(self, layer: int) -> Tensor:
        return self.buffer.span(layer % len(self.buffer.data), self.tokens)

    def segments(self, layer: int) -> Iterator[KvRows]:
        yield self.buffer.rows(layer % len(self.buffer.data), TokenRange(self.buffer.tokens.start, self.tokens.end))

    def place(self) -> KvPlace:
        data, held = self.buffer.data, self.buffer.tokens
        assert held.start <= self.tokens.start, f"{self.tokens} outside {held}"
        assert self.tokens.end <= held.end, f"{self.tokens} outside {held}"
        num_keys = self.tokens.end - self.buffer.tokens.start
        layer_bytes = data.stride(0) * data.element_size()
        return KvPlace(data.data_ptr(), layer_bytes, len(data), num_keys, len(self.tokens))


def _shape(layout: KvLayout, tokens: TokenRange) -> tuple[int, ...]:
    return (layout.num_layers, len(tokens), 2, layout.num_kv_heads, layout.head_dim)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate a tensor from numpy, which requests huge pages for large memory. With 4 KiB pages, the page faults of
    first writes took two thirds of the time of a push into a new slot."""
    memory = np.empty(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)


def byte_view(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor of any dtype as writable bytes. The view keeps the memory allocated.
    Raises WrongMemoryError for memory of a device."""
    if tensor.device.type != "cpu":
        raise WrongMemoryError(f"a tensor on {tensor.device} has no bytes of the host: copy it over the link first")
    require_home(tensor.data_ptr())
    return bytes_of(tensor)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory as `byte_view` does, also that of an emulated device. For links only, which access both
    memories."""
    assert tensor.is_contiguous()
    return tensor.view(torch.uint8).view(-1).numpy().data
