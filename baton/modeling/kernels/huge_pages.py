"""Memory in huge pages for weights that every step reads from start to end.

`linear` stores its panels in this memory. With pages of 4 KiB, a checkpoint of some hundred megabytes needs far more
address translations than a processor caches, and the hardware prefetcher stops at the end of each page.
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
    """Allocator that packs tensors into large memory regions (extents). An extent is freed when its last tensor is
    freed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._extent = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy of a CPU tensor in huge pages. Raises OSError if the memory cannot be allocated."""
        copied = self._take(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        return copied.copy_(tensor)

    def release(self) -> None:
        """Keep no memory that contains no tensor."""
        with self._lock:
            self._extent, self._used = torch.empty(0, dtype=torch.uint8), 0

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
"""Allocator of this process for weights that are stored in panels (blocks of 32 rows for the linear kernel)."""
