"""Memory in huge pages for weights, which every step reads from end to end.

`linear` keeps its panels here. In pages of 4 KiB, a checkpoint of some hundred megabytes needs far more address
translations than a processor caches, and the prefetcher stops at the end of each page.
"""

import math
import mmap
import sys
import threading

import torch
from torch import Tensor

_EXTENT_BYTES = 64 << 20
_ALIGNMENT = 64


class HugePages:
    """Allocator that packs tensors into extents. An extent is freed with its last tensor. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._extent = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy in huge pages, on the CPU. Raises OSError when memory cannot be allocated."""
        copied = self._take(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        return copied.copy_(tensor)

    def _take(self, num_bytes: int) -> Tensor:
        with self._lock:
            if num_bytes > len(self._extent) - self._used:
                self._extent, self._used = _extent(num_bytes), 0
            start = self._used
            self._used = math.ceil((start + num_bytes) / _ALIGNMENT) * _ALIGNMENT
            return self._extent[start : start + num_bytes]


def _extent(num_bytes: int) -> Tensor:
    size = math.ceil(num_bytes / _EXTENT_BYTES) * _EXTENT_BYTES
    mapping = mmap.mmap(-1, size)
    if sys.platform == "linux":
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)


WEIGHTS = HugePages()
"""Memory of the weights in panels of this process."""
