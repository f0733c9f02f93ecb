"""The device cuda: a GPU, with home memory that is pinned, and streams of their own for copies in each direction.

Written against torch's documentation, and not run yet: tools/cuda_check.sh runs it where there is a GPU.
"""

import threading

import torch
from torch import Tensor

from baton.types import KvLayout, TokenRange
from modeling.device.copying import LinkAccess
from modeling.device.port import Copies, MemoryUse, Transfer, num_bytes_of
from modeling.kv.buffers import TORCH_DTYPES, KvBuffer
from modeling.kv.memory import TensorMemory
from modeling.kv.pool_memory import TensorPool


class CudaTransfer:
    """A Transfer on a stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def result(self) -> None:
        """Wait for the device, without the GIL."""
        self._event.synchronize()

    def join(self) -> None:
        """Let the present stream wait; this thread goes on."""
        torch.cuda.current_stream().wait_event(self._event)

    wait = result


class CudaLink:
    """A Link of two streams. Bytes count when their copies are asked for."""

    def __init__(self, device: torch.device) -> None:
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._counting = threading.Lock()
        self.num_bytes_fetched = 0
        self.num_bytes_stored = 0

    def fetch(self, copies: Copies) -> Transfer:
        """Begin to copy, behind what the present stream has been given: that may still read what is overwritten."""
        with self._counting:
            self.num_bytes_fetched += num_bytes_of(copies)
        return self._copy(self._in, copies)

    def store(self, copies: Copies) -> Transfer:
        """Begin to copy, behind what the present stream has been given."""
        with self._counting:
            self.num_bytes_stored += num_bytes_of(copies)
        return self._copy(self._out, copies)

    def rest(self) -> None:
        """Wait for both streams."""
        self._in.synchronize()
        self._out.synchronize()

    def _copy(self, stream: torch.cuda.Stream, copies: Copies) -> CudaTransfer:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for to, source in copies:
                to.copy_(source, non_blocking=True)
                (to if to.is_cuda else source).record_stream(stream)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        return CudaTransfer(event)


class CudaDevice:
    """One GPU. Implements Device."""

    name = "cuda"
    is_home = False

    def __init__(self, index: int = 0) -> None:
        """Raise what torch raises when there is no such device."""
        self.torch_device = torch.device("cuda", index)
        self.link = CudaLink(self.torch_device)
        self._access = LinkAccess(self.link, _pinned_like)

    @property
    def memory_use(self) -> MemoryUse:
        """Return what torch uses of the device's memory, and that with what no process holds: the limit."""
        device = self.torch_device
        free_bytes, _ = torch.cuda.mem_get_info(device)
        limit_bytes = free_bytes + torch.cuda.memory_reserved(device)
        return MemoryUse(limit_bytes, torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))

    def row_memory(self, layout: KvLayout, max_tokens: int) -> TensorMemory:
        """Make memory on the device, for the longest row."""
        return TensorMemory(layout, max_tokens, self.torch_device, access=self._access)

    def pool_memory(self, layout: KvLayout, num_pages: int, page_tokens: int) -> TensorPool:
        """Make memory on the device, all of it at once."""
        return TensorPool(layout, num_pages, page_tokens, self.torch_device, self._access)

    def home_memory(self, layout: KvLayout, max_tokens: int) -> TensorMemory:
        """Make pinned memory, for the longest row."""
        return TensorMemory(layout, max_tokens, torch.device("cpu"), pinned=True)

    def buffer(self, layout: KvLayout, tokens: TokenRange) -> KvBuffer:
        """Make a buffer on the device."""
        shape = (layout.num_layers, len(tokens), 2, layout.num_kv_heads, layout.head_dim)
        data = torch.empty(shape, dtype=TORCH_DTYPES[layout.dtype], device=self.torch_device)
        return KvBuffer.of(layout, tokens, data, self._access)

    def home_buffer(self, layout: KvLayout, tokens: TokenRange) -> KvBuffer:
        """Make a buffer in pinned memory, which torch keeps for the next one."""
        shape = (layout.num_layers, len(tokens), 2, layout.num_kv_heads, layout.head_dim)
        return KvBuffer.of(layout, tokens, torch.empty(shape, dtype=TORCH_DTYPES[layout.dtype], pin_memory=True))

    def bound(self, limit_bytes: int | None) -> None:
        """Do nothing: torch refuses what does not fit."""

    def require(self, address: int, num_bytes: int) -> None:
        """Do nothing: torch itself refuses to compute with both memories."""


def _pinned_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
