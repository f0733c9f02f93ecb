"""The link between host and device: every copy of KV between the two goes through here, and is counted.

Fetches run on the link's own thread, in the order in which they were asked for, while the engine's thread computes;
what the link copies, nobody else touches until it is done. Where the device is the CPU, the link is memory bandwidth.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from modeling.kv.buffers import byte_view

Copies = Sequence[tuple[Tensor, Tensor]]
"""`(to, from)` pairs, contiguous and of equal shape and dtype."""
CopyTensor = Callable[[Tensor, Tensor], None]
"""Copies `(to, from)`, and returns when that is done."""


def copy_tensor(to: Tensor, source: Tensor) -> None:
    """On the CPU on one core and without the GIL: torch would take the cores that compute. On CUDA in the default
    stream, behind the kernels that still read what is overwritten: right, but not beside them."""
    if to.device.type == source.device.type == "cpu":
        np.copyto(np.asarray(byte_view(to)), np.asarray(byte_view(source)))
    else:
        to.copy_(source, non_blocking=True)
        torch.cuda.current_stream().synchronize()


class HostLink:
    """One direction at a time, first come, first served. `fetch` and `store` are called by one thread."""

    def __init__(self, copy: CopyTensor = copy_tensor) -> None:
        """`copy` is the copy primitive."""
        self.num_bytes_fetched = 0
        """From home to the device, of copies that are done."""
        self.num_bytes_stored = 0
        """From the device home."""
        self._copy = copy
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-link")

    def fetch(self, copies: Copies) -> "Future[None]":
        """Begins to copy from home to the device; the future tells when all is there, and raises what went wrong."""
        return self._thread.submit(self._fetch, copies)

    def store(self, copies: Copies) -> None:
        """Copies from the device home; returns when that is done."""
        for to, source in copies:
            self._copy(to, source)
            self.num_bytes_stored += source.nbytes

    def close(self) -> None:
        """Waits for the copies that were asked for. Idempotent."""
        self._thread.shutdown()

    def _fetch(self, copies: Copies) -> None:
        for to, source in copies:
            self._copy(to, source)
            self.num_bytes_fetched += source.nbytes
