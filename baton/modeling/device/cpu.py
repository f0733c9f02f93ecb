"""The device `cpu`: it computes in host memory, so its link copies from host memory to host memory."""

import torch

from baton.modeling.device.copying import CopyTensor, ThreadLink, copy_bytes
from baton.modeling.device.port import NO_MEMORY
from baton.modeling.kv.buffers import KvBuffer
from baton.modeling.kv.pool_memory import MappedPool
from baton.modeling.kv.row_memory import PagedMemory
from baton.types import KvLayout, TokenRange


class CpuDevice:
    """Device that computes on the CPU. Its link copies at the speed of memory. It is used by residency policies that
    keep a separate copy of KV on the CPU as well."""

    name = "cpu"
    torch_device = torch.device("cpu")
    is_home = True
    memory_use = NO_MEMORY

    def __init__(self, copy: CopyTensor = copy_bytes) -> None:
        """`copy` is the function that copies one tensor for the link."""
        self.link = ThreadLink(copy)

    def row_memory(self, layout: KvLayout, max_tokens: int) -> PagedMemory:
        """Make memory whose pages are committed when they are written."""
        return PagedMemory(layout, max_tokens)

    def pool_memory(self, layout: KvLayout, num_pages: int, page_tokens: int) -> MappedPool:
        """Make memory whose pages are committed when they are written."""
        return MappedPool(layout, num_pages, page_tokens)

    def home_memory(self, layout: KvLayout, max_tokens: int) -> PagedMemory:
        """Make memory whose pages are committed when they are written."""
        return PagedMemory(layout, max_tokens)

    def buffer(self, layout: KvLayout, tokens: TokenRange) -> KvBuffer:
        """Make a buffer in host memory."""
        return KvBuffer(layout, tokens)

    home_buffer = buffer

    def bound(self, limit_bytes: int | None) -> None:
        """Do nothing: host memory is limited by the operating system."""

    def require(self, address: int, num_bytes: int) -> None:
        """Do nothing: all memory belongs to the device."""
