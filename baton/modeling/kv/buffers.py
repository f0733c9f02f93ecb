"""KV memory: token-major buffers, views for attention, and raw bytes for the transport.

Both worker roles store KV in these buffers. `baton.modeling.forward.attention` reads their views, and `transport` moves
their bytes. A buffer is either in host memory, which the host reads and writes in place, or in a device's memory, which
the host accesses over a link (`baton.modeling.device`).

Shape letters: S cached tokens, G kv heads, H head dim, L layers.
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
"""torch dtype for each dtype name of KvLayout."""

OUT_OF_MEMORY = (MemoryError, RuntimeError)
"""Errors that numpy and torch raise if the memory of a buffer cannot be allocated."""


Writes = Sequence[tuple[Sequence[Tensor], memoryview]]
"""Pairs `(targets, data)`: contiguous tensors, which differ at most in the length of their first dimension, and the
bytes in host memory that overwrite them one after another. `data` has as many bytes as all its targets together."""


class HostAccess(Protocol):
    """Interface through which the host reads and writes the bytes of a buffer. Thread-safe."""

    @property
    def frames(self) -> StagingFrames | None:
        """Return the staging frames (preallocated buffers in host memory), from which `write` copies directly. None:
        `write` copies directly from any memory."""

    def read(self, sources: Sequence[Tensor]) -> memoryview:
        """Return the bytes of contiguous tensors, concatenated. The result is a view for a single tensor in host
        memory. Otherwise it is a copy, and the call blocks until the copy is complete."""

    def queued(self) -> Transfer:
        """Return the work that this thread has queued on the device so far, as a transfer that ends with it."""

    def write(self, writes: Writes, *, after: Transfer | None) -> Transfer:
        """Copy the data of each pair in `writes` to its targets. Copies to host memory do not hold the GIL. Copies to a
        device's memory are only started: use the returned transfer to wait for them. Data in staging frames
        (preallocated buffers in host memory) must not change until the transfer is done. All other data may change as
        soon as this method returns. Copies to a device begin when `after` has ended: pass `queued()` if queued work may
        still use the memory of a target. None: they do not wait for any work of the device."""


class HomeAccess:
    """HostAccess for buffers in host memory."""

    frames = None

    def read(self, sources: Sequence[Tensor]) -> memoryview:
        """Return the bytes of the tensors: a view for a single tensor, or one copy of several tensors."""
        views = [byte_view(source) for source in sources]
        return views[0] if len(views) == 1 else memoryview(b"".join(views))

    def queued(self) -> Transfer:
        """Return a transfer that has ended, because no work on host memory is queued."""
        return DoneTransfer()

    def write(self, writes: Writes, *, after: Transfer | None) -> Transfer:
        """Copy the bytes with numpy, and return when the copy is done. `after` is not used, because no work on host
        memory is queued. Torch is not used, because it does not accept the read-only memory of gRPC messages."""
        for targets, data in writes:
            start = 0
            for to in targets:
                np.copyto(np.asarray(byte_view(to)), np.frombuffer(data, np.uint8)[start : start + to.nbytes])
                start += to.nbytes
        return DoneTransfer()


HOME = HomeAccess()


@dataclass(frozen=True)
class KvRows:
    """Keys and values of consecutive tokens in one layer, in the form that attention reads. `k_SGH` and `v_SGH` are
    views of KV memory, never copies."""

    k_SGH: Tensor
    v_SGH: Tensor
    first_position: int
    """Position of the first token in its sequence."""

    @property
    def end_position(self) -> int:
        return self.first_position + self.k_SGH.shape[0]

    def slice(self, start: int, end: int) -> "KvRows":
        """Return views of the keys and values at the sequence's positions [start, end). Positions outside this object
        are ignored."""
        low = max(start - self.first_position, 0)
        high = max(min(end, self.end_position) - self.first_position, low)
        if low == 0 and high == self.k_SGH.shape[0]:
            return self
        return KvRows(self.k_SGH[low:high], self.v_SGH[low:high], self.first_position + low)


class KvBuffer:
    """KV of the tokens `tokens` of one sequence in all layers: one tensor `[L, S, 2, G, H]`.

    The constructor allocates the memory. `over` and `of` use existing memory instead. The memory is freed when its last
    view is freed. On the CPU, memory pages of a large buffer are committed when they are first written.

    Not thread-safe by itself. Threads that write at the same time must write different token ranges. A range may be
    read only after it has been written.
    """

    access: HostAccess = HOME

    def __init__(self, layout: KvLayout, tokens: TokenRange) -> None:
        """Allocate a buffer in host memory. If there is too little memory, raises one of the errors in
        OUT_OF_MEMORY."""
        self.layout = layout
        self.tokens = tokens
        self.data = _empty(_shape(layout, tokens), TORCH_DTYPES[layout.dtype])

    @classmethod
    def over(cls, layout: KvLayout, tokens: TokenRange, memory: memoryview) -> Self:
        """Create a buffer over existing host memory. The memory must be writable and have exactly the size of the
        buffer. It stays allocated until the last view is freed."""
        assert memory.nbytes == len(tokens) * layout.token_bytes, f"{memory.nbytes} bytes for {tokens}"
        data = torch.frombuffer(memory, dtype=TORCH_DTYPES[layout.dtype]).view(_shape(layout, tokens))
        return cls.of(layout, tokens, data)

    @classmethod
    def of(cls, layout: KvLayout, tokens: TokenRange, data: Tensor, access: HostAccess = HOME) -> Self:
        """Create a buffer over the tensor `data` with shape `[L, S, 2, G, H]`. Each layer must be contiguous. `access`
        is the interface through which the host reads and writes the tensor's memory."""
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
        """Return a contiguous view `[len(tokens), 2, G, H]` of the KV of `tokens` in `layer`. The tokens must be within
        the buffer."""
        assert self.tokens.start <= tokens.start, f"{tokens} outside {self.tokens}"
        assert tokens.end <= self.tokens.end, f"{tokens} outside {self.tokens}"
        return self.data[layer, tokens.start - self.tokens.start : tokens.end - self.tokens.start]

    def rows(self, layer: int, tokens: TokenRange) -> KvRows:
        """Return views of the keys and values of `tokens` in `layer`, in the form that attention reads."""
        span = self.span(layer, tokens)
        return KvRows(span[:, 0], span[:, 1], tokens.start)

    def export(self, layer: int, tokens: TokenRange) -> memoryview:
        """Return the bytes of the KV of `tokens` in `layer`. For host memory, the result is a view. For device memory,
        it is a copy, and the call blocks until the copy is complete."""
        return self.access.read([self.span(layer, tokens)])

    def write(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        """Copy `data` into the KV of `tokens` in `layer`, and return when the copy is done. The number of bytes must
        match exactly."""
        self.begin_write(layer, tokens, data).result()

    def begin_write(self, layer: int, tokens: TokenRange, data: memoryview) -> Transfer:
        """Start to copy `data` into the KV of `tokens` in `layer`. The number of bytes must match exactly. If `data` is
        in staging frames (preallocated buffers in host memory), it must not change until the transfer is done. A copy
        to a device begins after the work that this thread has queued there: if the memory was another tensor's before,
        this work may still use it."""
        assert data.nbytes == len(tokens) * self.layout.row_bytes, f"{data.nbytes} bytes for {tokens}"
        return self.access.write([([self.span(layer, tokens)], data)], after=self.access.queued())

    def copy_from(self, other: "KvBuffer", tokens: TokenRange) -> None:
        """Copy the KV of `tokens` in all layers from another buffer. Both buffers must have the same layout and be in
        the same memory."""
        for layer in range(self.layout.num_layers):
            self.span(layer, tokens).copy_(other.span(layer, tokens))


MakeBuffer = Callable[[KvLayout, TokenRange], KvBuffer]


class LayerBuffers:
    """KV of the tokens `tokens` of one sequence, with memory only for the layers that are in use.

    Memory for a layer is allocated at the first call for this layer, and kept until the layer is released. Released
    memory is reused for other layers. The total memory therefore depends on the maximum number of layers that are in
    use at the same time. Not thread-safe.
    """

    def __init__(self, layout: KvLayout, tokens: TokenRange, make_buffer: MakeBuffer = KvBuffer) -> None:
        self.layout = layout
        self._layout = dataclasses.replace(layout, num_layers=1)
        self._tokens = tokens
        self._make_buffer = make_buffer
        self._held: dict[int, KvBuffer] = {}
        self._free: list[KvBuffer] = []

    def span(self, layer: int, tokens: TokenRange) -> Tensor:
        """Return a contiguous view `[len(tokens), 2, G, H]` of `tokens` in `layer`. Memory for the layer is allocated
        if necessary. If there is too little memory, raises one of the errors in OUT_OF_MEMORY."""
        return self._buffer(layer).span(0, tokens)

    def rows(self, layer: int, tokens: TokenRange) -> KvRows:
        """Return views of the keys and values of `tokens` in `layer`, in the form that attention reads."""
        return self._buffer(layer).rows(0, tokens)

    def release(self, layer: int) -> None:
        """Release the memory of `layer`, so that other layers can use it. The layer must have memory. Views of this
        memory must not be used any more."""
        self._free.append(self._held.pop(layer))

    def drop(self) -> None:
        """Free the memory of all layers. No view of it may be used any more."""
        self._held.clear()
        self._free.clear()

    def _buffer(self, layer: int) -> KvBuffer:
        if layer not in self._held:
            self._held[layer] = self._free.pop() if self._free else self._make_buffer(self._layout, self._tokens)
        return self._held[layer]


@dataclass(frozen=True)
class BlockTable:
    """Block table of one sequence: the indices of its pages, in order. It is read when a step begins."""

    data_LPS2GH: Tensor
    """Memory of all pages of the device: P pages of S tokens in each of L layers. A page is contiguous within a
    layer."""
    pages_C: Tensor
    """Indices of the sequence's pages, int32, in host memory. Entries after the last page of the sequence are
    unused."""

    @property
    def page_tokens(self) -> int:
        return self.data_LPS2GH.shape[2]


@dataclass(frozen=True)
class KvPlace:
    """Location of the keys and values of one sequence: contiguous in CPU memory, or in pages of device memory."""

    address: int
    """Address of the first token's K in layer 0, or 0 if KV is in pages. Each token's K is followed by its V, and then
    by the K of the next token."""
    layer_bytes: int
    """Number of bytes from the start of one layer to the start of the next layer."""
    num_layers: int
    """Number of layers that have memory at this location. If `others` (the location of later layers) is None, all
    layers of the model use this memory: the model's layer l uses layer l modulo `num_layers`. If `others` is set, only
    the model's first `num_layers` layers use it."""
    num_keys: int
    """Number of keys of the sequence, including the keys of its new tokens."""
    num_new: int = 1
    """Number of new tokens. Their keys are the last keys of the sequence, unless `own` is set. Each new token attends
    to the keys up to its own key."""
    unseen: TokenRange | None = None
    """Range of keys, numbered from 0 within the sequence, to which no new token attends. It must not contain keys of
    new tokens. None: no keys are excluded."""
    own: int | None = None
    """Index of the new token's key among the keys at this location. It may be set only if there is exactly one new
    token. The key of this token may then have any index. None: the keys of new tokens are the last keys."""
    others: "KvPlace | None" = None
    """Location of the KV of the model's other layers, which are layer `num_layers` and all later layers. None: these
    layers share the memory of the first `num_layers` layers."""
    table: BlockTable | None = None
    """Block table of the sequence's pages. None: the keys of each layer are contiguous."""

    def without_unseen(self) -> "KvPlace":
        """Return the location without the pages to which no new token attends. The new tokens attend to all keys of the
        other pages, also to those in `unseen`. Must not be used for layers with a sliding window, because the keys
        after these pages get lower numbers."""
        if self.unseen is None or self.table is None:
            return self
        size = self.table.page_tokens
        first, end = -(-self.unseen.start // size), self.unseen.end // size
        if first >= end:
            return dataclasses.replace(self, unseen=None)
        pages_C = torch.cat((self.table.pages_C[:first], self.table.pages_C[end : -(-self.num_keys // size)]))
        table = dataclasses.replace(self.table, pages_C=pages_C)
        return dataclasses.replace(self, unseen=None, num_keys=self.num_keys - (end - first) * size, table=table)


@dataclass(frozen=True)
class BufferSpan:
    """Span in a buffer. A span is a range of consecutive new tokens of one sequence, at the positions `tokens`. The
    buffer, for example that of a generation slot, holds the KV of these tokens and of all earlier tokens. It may have
    fewer layers than the model. In this case several layers share its memory: the model's layer l uses layer l modulo
    the number of layers of the buffer."""

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
    Raises WrongMemoryError if the tensor is in device memory."""
    if tensor.device.type != "cpu":
        raise WrongMemoryError(f"a tensor on {tensor.device} has no bytes of the host: copy it over the link first")
    require_home(tensor.data_ptr())
    return bytes_of(tensor)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor as writable bytes. The memory may belong to an emulated device. Only
    links may call this function, because only they access both host and device memory."""
    assert tensor.is_contiguous()
    return tensor.view(torch.uint8).view(-1).numpy().data
