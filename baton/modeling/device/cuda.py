"""The device `cuda`: a GPU with pinned host memory, and one CUDA stream for the copies in each direction."""

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from baton.modeling.device.copying import LinkAccess
from baton.modeling.device.heads import PickedHeads, RowCopies
from baton.modeling.device.port import Copies, MemoryUse, num_bytes_of
from baton.modeling.kernels.triton.copies import copy_heads, copy_rows
from baton.modeling.kv.buffers import TORCH_DTYPES, KvBuffer
from baton.modeling.kv.pool_memory import TensorPool
from baton.modeling.kv.row_memory import TensorMemory
from baton.modeling.kv.transfers import Transfer
from baton.types import KvLayout, TokenRange


class CudaTransfer:
    """Transfer that runs on a CUDA stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def result(self) -> None:
        """Wait until the device has finished the copies, without holding the GIL."""
        self._event.synchronize()

    def join(self) -> None:
        """Make the current CUDA stream wait for the copies. The calling thread does not wait."""
        torch.cuda.current_stream().wait_event(self._event)

    wait = result


class CudaLink:
    """Link between host memory and a GPU, with one CUDA stream per direction. Copied bytes are counted when a copy
    is requested. The bytes of `fetch_heads` are counted when they are copied, because only the device knows their
    number."""

    def __init__(self, device: torch.device) -> None:
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._counting = threading.Lock()
        self._num_bytes_fetched = 0
        self._num_bytes_picked = torch.zeros((), dtype=torch.int64, device=device)
        """Number of bytes of selected keys and values that were copied to the device. It is counted on the device, on
        the stream for fetches."""
        self.num_bytes_stored = 0

    @property
    def num_bytes_fetched(self) -> int:
        """Return the number of bytes copied to the device so far. Waits for the requested fetches."""
        with torch.cuda.stream(self._in):
            num_bytes_picked = int(self._num_bytes_picked)
        return self._num_bytes_fetched + num_bytes_picked

    def queued(self) -> CudaTransfer:
        """Return the work that is queued on the current stream, as a transfer that ends with it."""
        return _recorded(torch.cuda.current_stream())

    def fetch(self, copies: Copies, *, after: Transfer | None) -> Transfer:
        """Start to copy tensors to the device, after the earlier fetches and after `after`. If `after` is None, the
        copies run while a step computes. The memory of a tensor that torch has just allocated needs `queued()`: torch
        reuses freed memory without waiting for the kernels that use it."""
        with self._counting:
            self._num_bytes_fetched += num_bytes_of(copies)
        return self._copy(self._in, copies, after)

    def store(self, copies: Copies) -> Transfer:
        """Start to copy tensors to host memory. The copy begins after the work that is queued on the current stream."""
        with self._counting:
            self.num_bytes_stored += num_bytes_of(copies)
        return self._copy(self._out, copies, self.queued())

    def fetch_heads(self, heads: PickedHeads) -> Transfer:
        """Start to copy selected keys and values to the device. The copy begins after the work that is queued on the
        current stream. A kernel reads pinned host memory directly. The host does not learn which keys are selected."""
        addresses, pairs = (heads.home_B, heads.there_B), (heads.pairs_BGK2, heads.num_BG)

        def work() -> None:
            copy_heads(*addresses, *pairs, heads.head_bytes)
            self._num_bytes_picked += heads.num_BG.sum() * (2 * heads.head_bytes)

        # The pairs are computed on the current stream, and the keys that the copy overwrites may still be read there.
        return self._run(self._in, work, (*addresses, *pairs), self.queued())

    def store_rows(self, rows: RowCopies) -> Transfer:
        """Start to copy one contiguous range of bytes (row) per sequence to host memory. The copy begins after the work
        that is queued on the current stream. A kernel writes directly to pinned host memory."""
        with self._counting:
            self.num_bytes_stored += rows.num_bytes
        addresses = rows.there_B, rows.home_B
        return self._run(self._out, lambda: copy_rows(*addresses, rows.row_bytes), addresses, self.queued())

    def rest(self) -> None:
        """Wait for the copies on both streams."""
        self._in.synchronize()
        self._out.synchronize()

    def _copy(self, stream: torch.cuda.Stream, copies: Copies, after: Transfer | None) -> CudaTransfer:
        def work() -> None:
            if copies:  # one call, whose loop over the copies runs in C++ and does not hold the GIL
                targets, sources = zip(*copies, strict=True)
                torch._foreach_copy_(targets, sources, non_blocking=True)

        return self._run(stream, work, [to if to.is_cuda else source for to, source in copies], after)

    def _run(
        self,
        stream: torch.cuda.Stream,
        work: Callable[[], None],
        used: Sequence[Tensor],
        after: Transfer | None,
    ) -> CudaTransfer:
        """Queue `work` on a stream, after the earlier work of this stream and after `after`. `used`: device tensors
        that `work` reads or writes, and that their owners may drop before it is done. If this raises, no copy runs
        any more."""
        with torch.cuda.stream(stream):
            if after is not None:
                after.join()
            try:
                work()
            except BaseException:
                stream.synchronize()  # the caller may reuse the memory of the copies that were queued
                raise
            for each in used:
                each.record_stream(stream)
            return _recorded(stream)


class CudaDevice:
    """One GPU. Implements Device."""

    name = "cuda"
    is_home = False

    def __init__(self, index: int = 0) -> None:
        """Open the GPU with this index. Raises torch's error if the GPU does not exist."""
        self.torch_device = torch.device("cuda", index)
        self.link = CudaLink(self.torch_device)
        self._access = LinkAccess(self.link, _pinned)

    @property
    def memory_use(self) -> MemoryUse:
        """Return the use of device memory by torch. The limit is the sum of the memory that torch has reserved and the
        free memory."""
        device = self.torch_device
        free_bytes, _ = torch.cuda.mem_get_info(device)
        limit_bytes = free_bytes + torch.cuda.memory_reserved(device)
        return MemoryUse(limit_bytes, torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))

    def row_memory(self, layout: KvLayout, max_tokens: int) -> TensorMemory:
        """Return an object for the KV of one sequence of up to `max_tokens` tokens, in device memory. The memory is
        allocated later, by `expect`, when a sequence begins to use it."""
        return TensorMemory(layout, max_tokens, self.torch_device, access=self._access)

    def pool_memory(self, layout: KvLayout, num_pages: int, page_tokens: int) -> TensorPool:
        """Allocate a pool of KV pages on the device. All memory is allocated immediately."""
        return TensorPool(layout, num_pages, page_tokens, self.torch_device, self._access)

    def home_memory(self, layout: KvLayout, max_tokens: int) -> TensorMemory:
        """Return an object for the KV of one sequence of up to `max_tokens` tokens, in pinned host memory. The memory
        is allocated later, by `expect`, when a sequence begins to use it."""
        return TensorMemory(layout, max_tokens, torch.device("cpu"), pinned=True)

    def buffer(self, layout: KvLayout, tokens: TokenRange) -> KvBuffer:
        """Allocate a KV buffer on the device."""
        shape = (layout.num_layers, len(tokens), 2, layout.num_kv_heads, layout.head_dim)
        data = torch.empty(shape, dtype=TORCH_DTYPES[layout.dtype], device=self.torch_device)
        return KvBuffer.of(layout, tokens, data, self._access)

    def home_buffer(self, layout: KvLayout, tokens: TokenRange) -> KvBuffer:
        """Allocate a KV buffer in pinned host memory. After the buffer is freed, torch reuses its memory for the next
        buffer."""
        shape = (layout.num_layers, len(tokens), 2, layout.num_kv_heads, layout.head_dim)
        return KvBuffer.of(layout, tokens, torch.empty(shape, dtype=TORCH_DTYPES[layout.dtype], pin_memory=True))

    def bound(self, limit_bytes: int | None) -> None:
        """Do nothing. Torch itself raises an error for allocations that do not fit."""

    def require(self, address: int, num_bytes: int) -> None:
        """Do nothing. Torch itself raises an error when a computation mixes host tensors and device tensors."""


def _recorded(stream: torch.cuda.Stream) -> CudaTransfer:
    """Return the work that is queued on a stream, as a transfer."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return CudaTransfer(event)


def _pinned(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
