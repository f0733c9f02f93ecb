"""Residency `device` with an additional index of partial keys, with which speculative drafts select keys. A partial key
is a key reduced to few columns, from which its score is approximated.

Sequences attend to all keys, as with `device`, so their results do not change. The partial keys are a RowPart (part of
a slot's memory). Their memory is reserved and counted as device memory, and is released at the end of the sequence.
They are computed from the sequence's own KV when drafts first need them
(`generate_workers.speculation.infinigen_view`). It does not matter whether this KV was pushed, prefilled locally or
copied.

Used on the engine's thread. Other threads may begin and end the use of a slot. Shape suffixes: T tokens, G kv heads, H
head dim.
"""

from collections.abc import Callable

from torch import Tensor

from baton.modeling.forward.selection import PartialKeys
from baton.modeling.sparse.bases import Basis
from baton.modeling.sparse.selection_file import PreparedSelection
from baton.types import KvLayout, TokenRange
from generate_workers.residency.device import DeviceResidency
from generate_workers.residency.port import KvShape
from generate_workers.residency.row_parts import MakeMemory
from generate_workers.residency.sparse.infinigen import PartialIndex

ReadKv = Callable[[int, TokenRange], Tensor]
"""Function that returns the KV of a range of a sequence's tokens in one layer, `[T, 2, G, H]`. Arguments: the layer and
the range."""


class DraftIndex(PartialIndex):
    """Partial keys of one slot's sequence, for drafts; a RowPart (part of the slot's memory). Only tokens for which
    `follow` was called have partial keys."""

    def __init__(self, layout: KvLayout, basis: Basis, max_tokens: int, make_memory: MakeMemory) -> None:
        """Raises OSError if the address space cannot be reserved."""
        super().__init__(layout, basis, max_tokens, make_memory)
        self._num_followed = 0
        """Number of first tokens of the current sequence whose partial keys have been computed. The KV of these tokens
        does not change any more."""

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begin the use of the slot by a new sequence, which has no partial keys yet. No memory is reserved, because
        drafts may never need partial keys."""
        self._num_followed = 0

    def follow(self, num_tokens: int, read: ReadKv) -> None:
        """Compute the partial keys of the sequence's first `num_tokens` tokens, except those that were computed before.
        The KV of these tokens must be final. `read`: function that returns this KV."""
        new = TokenRange(self._num_followed, num_tokens)
        if new:
            for layer in self.layers:
                self.add(layer, new.start, read(layer, new))
        self._num_followed = num_tokens

    def copy_from(self, other: PartialKeys, num_tokens: int) -> None:
        """Do nothing: partial keys are computed later, from the sequence's own KV."""


class IndexedResidency(DeviceResidency):
    """Residency that stores all KV on the device, and has partial keys with which drafts select keys."""

    def __init__(self, shape: KvShape, make_memory: MakeMemory, prepared: PreparedSelection) -> None:
        """`prepared`: results of `baton prepare` for the model, with which drafts select keys. Raises an error of
        OUT_OF_MEMORY, or OSError, if the address space cannot be reserved."""
        self.prepared = prepared
        """Results of `baton prepare` for the model, with which drafts select keys: the basis (projection of keys to few
        columns), and settings."""
        most, basis = shape.max_slot_tokens, prepared.basis
        self.indices = [DraftIndex(shape.layout, basis, most, make_memory) for _ in range(shape.num_slots)]
        """Partial keys of each slot."""
        super().__init__(shape, make_memory, self.indices)
