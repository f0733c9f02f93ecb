"""Copies of single keys over a link: selected keys and values to the device, and new tokens' rows to host memory.

Addresses are numbers, so that one call serves all sequences of a step, regardless of where their KV is stored. A
HeadLink takes them. Threads of the host copy for a CPU and an emulated device (`copying`), kernels for a GPU (`cuda`).

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
    """Selected keys and values of kv heads that are to be fetched: addresses, and the keys of each sequence. All
    tensors are on the link's device."""

    home_B: Tensor
    """Addresses of the sequences' KV of a layer in host memory, int64."""
    there_B: Tensor
    """Addresses of the sequences' destinations on the device, int64."""
    pairs_BGK2: Tensor
    """Pairs of a key's number in host memory and the number of its place on the device, int32."""
    num_BG: Tensor
    """Number of pairs of each kv head, int32."""
    head_bytes: int
    """Bytes of a head's key; its value has the same number."""

    @functools.cached_property
    def num_bytes(self) -> int:
        """Return the bytes that are fetched. Waits for the device if `num_BG` is computed there."""
        return int(self.num_BG.sum()) * 2 * self.head_bytes


@dataclass(frozen=True)
class RowCopies:
    """Rows to be stored, one for each of B sequences, each of the same number of bytes. Addresses are int64."""

    there_B: Tensor
    home_B: Tensor
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        """Return the bytes that are stored."""
        return len(self.home_B) * self.row_bytes


class HeadLink(Link, Protocol):
    """A Link that also copies by addresses."""

    def fetch_heads(self, heads: PickedHeads) -> Transfer:
        """Begin to copy selected keys and values to the device."""

    def store_rows(self, rows: RowCopies) -> Transfer:
        """Begin to copy rows to host memory, after the work that this thread has queued."""
