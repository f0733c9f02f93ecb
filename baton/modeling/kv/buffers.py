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
"""Pairs `(to, data)`: a contiguous tensor, and the bytes in host memory with which it is overwritten, of equal size."""


class HostAccess(Protocol):
    """The host's access to the bytes of a buffer's memory. Any thread may use it."""

    @property
    def frames(self) -> StagingFrames | None:
        """Return the staging frames from which `write` copies directly. None: `write` copies directly
        from any memory."""

    def read(self, sources: Sequence[Tensor]) -> memoryview:
        """Return the bytes of contiguous tensors, one after the other. For a single tensor in host memory the result is
        a view of it; otherwise it is one copy of all tensors. Blocks."""

    def write(self, writes: Writes) -> Transfer:
        """Copy into host memory without holding the GIL, or start to copy to a device's memory. Bytes in staging frames
        must not change before the transfer is done. All other bytes have been read when this returns."""


class HomeAccess:
    """HostAccess to host memory."""

    frames = None

    def read(self, sources: Sequence[Tensor]) -> memoryview:
        """Return a view of the memory for one tensor, or one copy of several tensors."""
        views = [byte_view(source) for source in sources]
        return views[0] if len(views) == 1 else memoryview(b"".join(views))

    def write(self, writes: Writes) -> Transfer:
        """Copy with numpy before returning: gRPC's memory is read-only, which torch does not accept."""
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
    """Absolute position of the first row."""

    @property
    def end_position(self) -> int:
        return self.first_position + self.k_SGH.shape[0]

    def slice(self, start: int, end: int) -> "KvRows":
        """Return the rows at absolute positions [start, end), limited to the rows that exist."""
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
        """Return a buffer whose data is in `memory`, which must be writable and have the buffer's size. The memory is
        kept until the last view is freed."""
        assert memory.nbytes == len(tokens) * layout.token_bytes, f"{memory.nbytes} bytes for {tokens}"
        data = torch.frombuffer(memory, dtype=TORCH_DTYPES[layout.dtype]).view(_shape(layout, tokens))
        return cls.of(layout, tokens, data)

    @classmethod
    def of(cls, layout: KvLayout, tokens: TokenRange, data: Tensor, access: HostAccess = HOME) -> Self:
        """Return a buffer whose data is the tensor `data`, `[L, S, 2, G, H]`, which `access` can read and write. Each
        layer must be contiguous."""
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
        """Copy `data`, which must have exactly the size of the range, into the buffer. Return when the copy is done."""
        self.begin_write(layer, tokens, data).result()

    def begin_write(self, layer: int, tokens: TokenRange, data: memoryview) -> Transfer:
        """Start to copy `data`, which must have exactly the size of the range, into the buffer, with
        HostAccess.write."""
        assert data.nbytes == len(tokens) * self.layout.row_bytes, f"{data.nbytes} bytes for {tokens}"
        return self.access.write([(self.span(layer, tokens), data)])

    def copy_from(self, other: "KvBuffer", tokens: TokenRange) -> None:
        """Copy `tokens` of all layers from another buffer of the same layout and memory."""
        for layer in range(self.layout.num_layers):
            self.span(layer, tokens).copy_(other.span(layer, tokens))


MakeBuffer = Callable[[KvLayout, TokenRange], KvBuffer]


class LayerBuffers:
    """KV of the tokens `tokens` of one sequence, in the layers that are in use.

    A layer has memory from the first call for it until it is released. Released memory is reused for the next layer. So
    the total memory is that of the maximum number of layers that were in use at the same time. Not thread-safe.
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
    """Block table of one sequence: the numbers of its pages, in order. It is read when a step begins."""

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
    """Address of K of the first position in layer 0; 0 with pages. The V of a token follows its K, and the K of the
    next token follows."""
    layer_bytes: int
    """Number of bytes from the beginning of one layer to the beginning of the next."""
    num_layers: int
    """Number of layers that have memory at this location. The model's layer l is stored as layer l modulo this number,
    unless `others` is given."""
    num_keys: int
    """Number of keys of the sequence, including those of new tokens."""
    num_new: int = 1
    """Number of keys of new tokens, which are the last keys. Each new token attends to the keys up to its own."""
    unseen: TokenRange | None = None
    """Keys, numbered from the first position, that no new token attends to. It must not contain keys of new tokens."""
    own: int | None = None
    """Number of the new token's key, if the sequence has one new token. None: the keys of new tokens are
    the last ones."""
    others: "KvPlace | None" = None
    """Location of the layers from number `num_layers` on. None: they share the memory of the first layers."""
    table: BlockTable | None = None
    """Block table of the keys. None: the keys are contiguous in each layer."""


@dataclass(frozen=True)
class BufferSpan:
    """New tokens `tokens` of a sequence whose old and new KV is in one buffer, such as that of a generation slot. If
    the buffer has fewer layers than the model, layers share its memory: the model's layer l is stored as layer l modulo
    the buffer's number of layers."""

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
    """Return the memory of a contiguous tensor as writable bytes, including memory of an emulated device. Only for
    links, which access both memories."""
    assert tensor.is_contiguous()
    return tensor.view(torch.uint8).view(-1).numpy().data
