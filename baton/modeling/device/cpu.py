"""The device `cpu`. It computes in host memory, so its link copies from host memory to host memory."""

import torch

from baton.modeling.device.copying import CopyTensor, ThreadLink, copy_bytes
from baton.modeling.device.port import NO_MEMORY
from baton.modeling.kv.buffers import KvBuffer
from baton.modeling.kv.pool_memory import MappedPool
from baton.modeling.kv.row_memory import PagedMemory
from baton.types import KvLayout, TokenRange


class CpuDevice:
    """Device that computes on the CPU. Its link copies at the speed of memory. The link is used only by policies that
    keep a second copy of the KV."""

    name = "cpu"
    torch_device = torch.device("cpu")
    is_home = True
    memory_use = NO_MEMORY

    def __init__(self, copy: CopyTensor = copy_bytes) -> None:
        """Create the device. `copy(target, source)` copies one tensor for the link."""
        self.link = ThreadLink(copy)

    def row_memory(self, layout: KvLayout, max_tokens: int) -> PagedMemory:
        """Reserve memory for the KV of one sequence. Memory pages are committed when they are first written."""
        return PagedMemory(layout, max_tokens)

    def pool_memory(self, layout: KvLayout, num_pages: int, page_tokens: int) -> MappedPool:
        """Reserve a pool of KV pages. Memory is committed when it is first written."""
        return MappedPool(layout, num_pages, page_tokens)

    def home_memory(self, layout: KvLayout, max_tokens: int) -> PagedMemory:
        """Reserve host memory for the KV of one sequence. Memory pages are committed when they are first written."""
        return PagedMemory(layout, max_tokens)

    def buffer(self, layout: KvLayout, tokens: TokenRange) -> KvBuffer:
        """Allocate a KV buffer in host memory."""
        return KvBuffer(layout, tokens)

    home_buffer = buffer

    def bound(self, limit_bytes: int | None) -> None:
        """Do nothing. The operating system limits host memory."""

    def require(self, address: int, num_bytes: int) -> None:
        """Do nothing. All memory of the process belongs to this device."""
