"""Residency `device` that also stores partial keys of each sequence, with which speculative drafts select keys.
Sequences attend to all keys, as with `device`, so their results do not change. The partial keys are a RowPart of a
slot: they are released with the slot's claim, and promised and counted as device memory. They are computed from the
sequence's own KV when drafts first need them (`generate_workers.speculation.infinigen_view`), whether the KV was
pushed, prefilled locally or copied.

Engine's thread, except the beginning and end of claims. Shape suffixes: T tokens, G kv heads, H head dim.
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
"""Function that returns a layer's KV of a range of a sequence's tokens, `[T, 2, G, H]`."""


class DraftIndex(PartialIndex):
    """RowPart of a slot: partial keys of the tokens for which `follow` was called."""

    def __init__(self, layout: KvLayout, basis: Basis, max_tokens: int, make_memory: MakeMemory) -> None:
        """Raises OSError if the address space cannot be reserved."""
        super().__init__(layout, basis, max_tokens, make_memory)
        self._num_followed = 0
        """Number of the current claim's tokens whose partial keys were made from their final KV."""

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begin a claim, without partial keys. No memory is reserved, because drafts may never need them."""
        self._num_followed = 0

    def follow(self, num_tokens: int, read: ReadKv) -> None:
        """Make the missing partial keys of the sequence's first `num_tokens` tokens, whose KV must be final."""
        new = TokenRange(self._num_followed, num_tokens)
        if new:
            for layer in self.layers:
                self.add(layer, new.start, read(layer, new))
        self._num_followed = num_tokens

    def copy_from(self, other: PartialKeys, num_tokens: int) -> None:
        """Do nothing: partial keys are made from the sequence's own KV."""


class IndexedResidency(DeviceResidency):
    """Residency that keeps all KV on the device, and partial keys of all KV."""

    def __init__(self, shape: KvShape, make_memory: MakeMemory, prepared: PreparedSelection) -> None:
        """Raises an error of OUT_OF_MEMORY, or OSError, if the address space cannot be reserved."""
        self.prepared = prepared
        """Prepared selection with which drafts select keys."""
        most, basis = shape.max_slot_tokens, prepared.basis
        self.indices = [DraftIndex(shape.layout, basis, most, make_memory) for _ in range(shape.num_slots)]
        """Partial keys of each slot."""
        super().__init__(shape, make_memory, self.indices)
