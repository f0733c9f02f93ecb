"""Interface between a residency policy that fetches selected keys (picks) and the two mechanisms that store these keys
on a device.

The policy (`infinigen`) decides which keys are selected, and when KV is fetched and stored. The module `hot_keys`
determines which area a layer uses. An area is device memory for selected keys and values of one layer at a time. A
mechanism owns the memory of all slots, assigns places (indices of an area) to selected keys, and lists the copies that
the policy runs:

    native_keys   for CPUs, and for a device that a CPU emulates: C++ kernels. Each slot has its own memory
    tensor_keys   for GPUs: tensor operations. The memory of a slot is pages of pools. The host does not read which
                  keys are selected

In names, a row is the memory of one slot. Layers are counted from the first layer that selects keys. Shape suffixes: B
sequences of one new token, G kv heads, H head dim.
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
"""Sequences of a step that select keys, as pairs of the slot's memory and a range that contains only the new token."""


class StepKeys(Protocol):
    """Interface to the device memory of one step, for the sequences that select keys in this step. The memory holds the
    selected keys and values, and the KV of each sequence's new token."""

    def admit(self, layer: int, picks: Picks) -> tuple[Picks, PickedHeads]:
        """Assign a place (index in device memory) to each key in `picks`, the keys that `layer` selects. Return `picks`
        with places instead of token indices, and the keys and values that must be fetched to their places. In each
        step, must be called once per layer, in ascending order of layers."""

    def own_keys(self, layer: int) -> Tensor:
        """Return the keys of the new tokens in `layer`, `[B, G, H]`, from the device memory that the layer uses."""

    def own_rows(self, layer: int) -> RowCopies:
        """Return the copies that write the KV of the new tokens in `layer` from the device to host memory."""


class FetchMechanism(Protocol):
    """Interface of an object that owns the memory of all slots on one device, and assigns places (indices) in this
    memory to selected keys. Used on the engine's thread."""

    @property
    def basis(self) -> Basis:
        """Return the basis: the matrices that project queries and keys to fewer columns. A projected key is called a
        partial key. The basis is stored on the device that computes the projections."""

    @property
    def scratch_bytes(self) -> int:
        """Return the number of bytes of device memory that the mechanism needs in addition to the slots' memory."""

    def row_bytes(self, num_areas: int) -> int:
        """Return the number of bytes of device memory that a sequence of the maximum length needs with `num_areas`
        areas, each of which holds selected keys and values of one layer at a time."""

    def make_rows(self, num_areas: int, num_rows: int) -> list[FetchedRow]:
        """Make and return a FetchedRow, the memory of one slot, for every slot. Each has `num_areas` areas: device
        memory for selected keys and values of one layer at a time. `num_rows` is the number of sequences for which the
        device has memory at the same time. Must be called exactly once. Raises an error of OUT_OF_MEMORY, or
        OSError."""

    def scored(self, keys: Sequence[Any], lengths: Sequence[int], num_tokens: Sequence[int]) -> ScoredKeys:
        """Return an object that scores the partial keys (keys projected to fewer columns) of several sequences.
        `lengths`: number of keys of each sequence, including the new token's key. `num_tokens`: number of tokens of
        each sequence; it is larger than the number of keys if keys were evicted."""

    def begin(self, choosing: Choosing) -> StepKeys:
        """Begin a step of the sequences in `choosing`, and return the StepKeys of this step. All copies of the previous
        step must have ended."""
