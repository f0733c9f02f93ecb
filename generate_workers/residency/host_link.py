"""The link between host and device: every copy of KV between the two goes through here, and is counted.

Residency `host` uses it. Fetches run on the link's own thread, in the order in which they were asked for, while the
engine's thread computes; no other thread touches memory of a copy until it is done. Where the device is the CPU, the
link is memory bandwidth.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from modeling.kv.buffers import byte_view

Copies = Sequence[tuple[Tensor, Tensor]]
"""Pairs `(to, from)`, contiguous and of equal shape and dtype."""
CopyTensor = Callable[[Tensor, Tensor], None]
"""Copies `(to, from)`, and returns when the copy is done."""


def copy_tensor(to: Tensor, source: Tensor) -> None:
    """Copy a tensor, and return when the copy is done. On the CPU on one core and without the GIL: torch would take the
    cores that compute. On CUDA in the default stream, behind the kernels that still read what is overwritten: correct,
    but not concurrent with them."""
    if to.device.type == source.device.type == "cpu":
        np.copyto(np.asarray(byte_view(to)), np.asarray(byte_view(source)))
    else:
        to.copy_(source, non_blocking=True)
        torch.cuda.current_stream().synchronize()


class HostLink:
    """Copies in one direction at a time, first come, first served. One thread calls `fetch` and `store`."""

    def __init__(self, copy: CopyTensor = copy_tensor) -> None:
        """`copy` is the function that copies one tensor."""
        self._copy = copy
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-link")
        self._num_bytes_fetched = self._num_bytes_stored = 0  # each counted by one thread

    @property
    def num_bytes(self) -> int:
        """Return the bytes of finished copies, in both directions."""
        return self._num_bytes_fetched + self._num_bytes_stored

    def fetch(self, copies: Copies) -> "Future[None]":
        """Begin to copy from home to the device. The future is done when all is copied, and raises what went wrong."""
        return self._thread.submit(self._fetch, copies)

    def store(self, copies: Copies) -> None:
        """Copy from the device home, and return when that is done."""
        for to, source in copies:
            self._copy(to, source)
            self._num_bytes_stored += source.nbytes

    def close(self) -> None:
        """Wait for the copies that were asked for, and end the thread. Idempotent."""
        self._thread.shutdown()

    def _fetch(self, copies: Copies) -> None:
        for to, source in copies:
            self._copy(to, source)
            self._num_bytes_fetched += source.nbytes
