"""What crosses a link key by key: the picks of kv heads to the device, and new tokens' rows home.

Addresses are numbers, so that one call serves all rows of a step, wherever they lie. A HeadLink takes them: threads of
the host copy for a CPU and an emulated device (`copying`), kernels for a GPU (`cuda`).

B rows, G kv heads, K picks at most.
"""

import functools
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from modeling.device.port import Link
from modeling.kv.transfers import Transfer


@dataclass(frozen=True)
class PickedHeads:
    """Keys and values that kv heads picked, to be fetched: addresses of rows, and what is wanted of each. All tensors
    are where the link's device computes."""

    home_B: Tensor
    """Addresses of the rows' KV of a layer at home, int64."""
    there_B: Tensor
    """Addresses of the rows' places on the device, int64."""
    pairs_BGK2: Tensor
    """Number of a key at home and of its place on the device, int32."""
    num_BG: Tensor
    """Number of pairs, int32."""
    head_bytes: int
    """Bytes of a head's key, and of its value."""

    @functools.cached_property
    def num_bytes(self) -> int:
        """Return the bytes that are fetched. Waits for a device that counts the pairs."""
        return int(self.num_BG.sum()) * 2 * self.head_bytes


@dataclass(frozen=True)
class RowCopies:
    """The same number of bytes of each row, to be stored: addresses of B rows, int64."""

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
        """Begin to copy picked keys and values to the device."""

    def store_rows(self, rows: RowCopies) -> Transfer:
        """Begin to copy rows home, behind what this thread has computed."""
