"""Copies of single keys over a link: selected keys and values to the device, and new tokens' rows to host memory.

Locations are given as addresses, so that one call can copy for all sequences of a step, regardless of where their KV is
stored. A HeadLink runs the copies. For a CPU and an emulated device, host threads copy (`copying`); for a GPU, kernels
copy (`cuda`).

B sequences, G kv heads, at most K selected keys of each head.
"""

import functools
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from baton.modeling.device.port import Link
from baton.modeling.kv.transfers import Transfer


@dataclass(frozen=True)
class PickedHeads:
    """Selected keys and values of kv heads that are to be fetched. All tensors are on the link's device."""

    home_B: Tensor
    """Address of each sequence's KV in host memory, in one layer, int64."""
    there_B: Tensor
    """Address of each sequence's destination on the device, int64."""
    pairs_BGK2: Tensor
    """Pairs of numbers, int32: the key's number in host memory, and the number of its destination on the device."""
    num_BG: Tensor
    """Number of keys to fetch for each kv head, int32."""
    head_bytes: int
    """Number of bytes of one key of a head. Its value has the same number of bytes."""

    @functools.cached_property
    def num_bytes(self) -> int:
        """Return the bytes that are fetched. Waits for the device if `num_BG` is computed there."""
        return int(self.num_BG.sum()) * 2 * self.head_bytes


@dataclass(frozen=True)
class RowCopies:
    """Rows to be stored in host memory: one row for each of B sequences, all with the same number of bytes. Addresses
    are int64."""

    there_B: Tensor
    home_B: Tensor
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        """Return the bytes that are stored."""
        return len(self.home_B) * self.row_bytes


class HeadLink(Link, Protocol):
    """Link that can also copy between lists of addresses."""

    def fetch_heads(self, heads: PickedHeads) -> Transfer:
        """Start to copy selected keys and values to the device."""

    def store_rows(self, rows: RowCopies) -> Transfer:
        """Start to copy rows to host memory, after the work that this thread has queued."""
