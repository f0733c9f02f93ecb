"""Port between the policy that fetches selected keys (picks) and the two mechanisms that find places for picks on a
device.

The policy (`infinigen`, with the bookkeeping of `hot_keys`) decides which keys are picked, which areas layers use, and
when KV is fetched and stored. A mechanism owns the sequences' memory, and does what the policy decides:

    native_keys   CPUs, and the device that one emulates: kernels in C++ over addresses, Rows in memory of their own
    tensor_keys   GPUs: operations on tensors, Rows in pools; the host does not read the picks

Layers are counted from the first layer that selects keys. Shape suffixes: B sequences of one new token, G kv heads, H
head dim.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from baton.modeling.device.heads import PickedHeads, RowCopies
from baton.modeling.forward.selection import Picks
from baton.modeling.sparse.bases import Basis
from baton.types import TokenRange
from generate_workers.residency.fetched.rows import FetchedRow
from generate_workers.residency.sparse.infinigen import ScoredKeys

Choosing = Sequence[tuple[FetchedRow, TokenRange]]
"""Sequences of a step that select keys, each with its one new token."""


class StepKeys(Protocol):
    """Selecting sequences of one step, with places for their new tokens."""

    def admit(self, layer: int, picks: Picks) -> tuple[Picks, PickedHeads]:
        """Find places for a layer's picks. Return the picks as places, and the heads that have to be fetched. Called
        once per layer, in order."""

    def own_keys(self, layer: int) -> Tensor:
        """Return the new tokens' keys of a layer, `[B, G, H]`, from the layer's area."""

    def own_rows(self, layer: int) -> RowCopies:
        """Return the copies that write the new tokens' KV of a layer from its area to host memory."""


class FetchMechanism(Protocol):
    """Memory of all slots on one device, and the search for places in this memory. Used on the engine's thread."""

    @property
    def basis(self) -> Basis:
        """Return the basis, in memory of the device that computes with it."""

    @property
    def scratch_bytes(self) -> int:
        """Return the bytes of device memory that the mechanism needs in addition to the slots."""

    def row_bytes(self, num_areas: int) -> int:
        """Return the bytes of device memory that the longest sequence needs with `num_areas` areas."""

    def make_rows(self, num_areas: int, num_rows: int) -> list[FetchedRow]:
        """Make the Rows of all slots. `num_rows`: number of Rows that the device has room for at the same time. Called
        once. Raises an error of OUT_OF_MEMORY, or OSError."""

    def scored(self, keys: Sequence[Any], lengths: Sequence[int], num_tokens: Sequence[int]) -> ScoredKeys:
        """Return the ScoredKeys of sequences' partial keys. `lengths`, `num_tokens`: keys and tokens of each sequence,
        including the new ones."""

    def begin(self, choosing: Choosing) -> StepKeys:
        """Begin a step. No copy of the last step may still run."""
