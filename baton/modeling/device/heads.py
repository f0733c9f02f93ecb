"""Descriptions of copies of single keys and values between host memory and a device. PickedHeads describes selected
keys and values to copy to the device. RowCopies describes KV of new tokens to copy to host memory.

Memory locations are given as addresses. One call can therefore copy for all sequences of a step, regardless of where
their KV is stored. A HeadLink is a link that runs such copies. For a CPU or an emulated device it uses host threads
(`copying`), and for a GPU it uses kernels (`cuda`).

Shape letters: B sequences, G kv heads, K the maximum number of selected keys of a head.
"""

import functools
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from baton.modeling.device.port import Link
from baton.modeling.kv.transfers import Transfer


@dataclass(frozen=True)
class PickedHeads:
    """Selected keys and values to copy from host memory to a device, for each sequence and kv head. All tensors of this
    object are on the device's `torch_device`."""

    home_B: Tensor
    """Address in host memory of each sequence's KV in one layer, int64."""
    there_B: Tensor
    """Address on the device to which each sequence's keys and values are copied, int64."""
    pairs_BGK2: Tensor
    """Pairs of indices, int32: the index of the key in host memory, and the index of its destination on the device."""
    num_BG: Tensor
    """Number of keys to copy for each sequence and kv head, int32."""
    head_bytes: int
    """Number of bytes of one key of one head. A value has the same number of bytes."""

    @functools.cached_property
    def num_bytes(self) -> int:
        """Return the number of bytes to copy. Waits for the device if `num_BG` is computed on the device."""
        return int(self.num_BG.sum()) * 2 * self.head_bytes


@dataclass(frozen=True)
class RowCopies:
    """Contiguous ranges of bytes (rows) to copy to host memory: one for each of the B sequences, all with the same
    number of bytes. Addresses are int64."""

    there_B: Tensor
    home_B: Tensor
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        """Return the total number of bytes of all B ranges."""
        return len(self.home_B) * self.row_bytes


class HeadLink(Link, Protocol):
    """Link that can also copy single keys and values, given as lists of addresses."""

    def fetch_heads(self, heads: PickedHeads) -> Transfer:
        """Start to copy the selected keys and values to the device."""

    def store_rows(self, rows: RowCopies) -> Transfer:
        """Start to copy one contiguous range of bytes (row) per sequence to host memory. The copy begins after the work
        that this thread has queued on the device."""
