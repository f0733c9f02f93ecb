"""What fetching of picks asks of a device, as ints and tensors: the port between the policy and its two mechanisms.

The policy (`infinigen`, with the bookkeeping of `hot_keys`) says what is picked, which areas layers use, and when what
is fetched and stored. A mechanism has the rows' memory and does as it is told:

    native_keys   CPUs, and the device that one emulates: kernels in C++ over addresses, rows in memory of their own
    tensor_keys   GPUs: operations on tensors, rows in pools; the host learns nothing of what is picked

Layers are counted from the first that chooses. B rows of one new token, G kv heads, H head dim.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from baton.types import TokenRange
from generate_workers.residency.fetched.rows import FetchedRow
from generate_workers.residency.sparse.infinigen import ScoredKeys
from modeling.device.heads import PickedHeads, RowCopies
from modeling.forward.selection import Picks
from modeling.sparse.bases import Basis

Choosing = Sequence[tuple[FetchedRow, TokenRange]]
"""The rows of a step that choose, each with its one new token."""


class StepKeys(Protocol):
    """The choosing rows of one step, whose places for the new tokens are made."""

    def admit(self, layer: int, picks: Picks) -> tuple[Picks, PickedHeads]:
        """Find places for a layer's picks: return the picks as places, and what has to be fetched. Called once a layer,
        in order."""

    def own_keys(self, layer: int) -> Tensor:
        """Return the new tokens' keys of a layer, `[B, G, H]`, which its area holds."""

    def own_rows(self, layer: int) -> RowCopies:
        """Return the copies of the new tokens' KV of a layer from its area home."""


class FetchMechanism(Protocol):
    """The memory of all slots on one device, and what finds places in it. Engine's thread."""

    @property
    def basis(self) -> Basis:
        """Return the basis where the device computes with it."""

    @property
    def scratch_bytes(self) -> int:
        """Return the bytes of the device that the mechanism holds or takes beside rows."""

    def row_bytes(self, num_areas: int) -> int:
        """Return the bytes of the device that the longest row takes with so many areas."""

    def make_rows(self, num_areas: int, num_rows: int) -> list[FetchedRow]:
        """Make the rows of all slots. `num_rows`: how many of them the device has room for at a time. Called once.
        Raises what is in OUT_OF_MEMORY, or OSError."""

    def scored(self, keys: Sequence[Any], lengths: Sequence[int], num_tokens: Sequence[int]) -> ScoredKeys:
        """Return what is known of rows' partial keys: of each row the keys, and the tokens, the new ones included."""

    def begin(self, choosing: Choosing) -> StepKeys:
        """Begin a step; nothing of the last one is under way."""
