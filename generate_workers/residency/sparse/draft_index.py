"""Residency `device` with partial keys beside each row's KV, by which drafts of speculation choose keys.

Rows attend to all keys, as with `device`; nothing that they compute changes. The partial keys are a part of a slot's
row: they are given back with its claim, and promised and counted as the device's memory. They are made of the row's own
KV when drafts first need them (`generate_workers.speculation.infinigen`), whether that was pushed, prefilled here or
copied.

Engine's thread, but for the begin and the end of claims. T tokens, G kv heads, H head dim.
"""

from collections.abc import Callable

from torch import Tensor

from baton.types import KvLayout, TokenRange
from generate_workers.residency.device import DeviceResidency
from generate_workers.residency.port import KvShape
from generate_workers.residency.rows import MakeMemory
from generate_workers.residency.sparse.infinigen import PartialIndex
from modeling.forward.selection import PartialKeys
from modeling.sparse.bases import Basis
from modeling.sparse.selection_file import PreparedSelection

ReadKv = Callable[[int, TokenRange], Tensor]
"""Returns a layer's KV of some of a row's tokens, `[T, 2, G, H]`."""


class DraftIndex(PartialIndex):
    """A Part of a row: the partial keys of the tokens that it was told to follow."""

    def __init__(self, layout: KvLayout, basis: Basis, max_tokens: int, make_memory: MakeMemory) -> None:
        """Raise OSError when so much address space cannot be had."""
        super().__init__(layout, basis, max_tokens, make_memory)
        self._num_followed = 0
        """Tokens of the present claim whose partial keys are made of their final KV."""

    def open(self, num_tokens: int, capacity_tokens: int) -> None:
        """Begin a claim: no partial keys are made yet, and perhaps none ever."""
        self._num_followed = 0

    def follow(self, num_tokens: int, read: ReadKv) -> None:
        """Make what is missing of the partial keys of the row's first `num_tokens` tokens, whose KV is final."""
        new = TokenRange(self._num_followed, num_tokens)
        if new:
            for layer in self.layers:
                self.add(layer, new.start, read(layer, new))
        self._num_followed = num_tokens

    def copy_from(self, other: PartialKeys, num_tokens: int) -> None:
        """Do nothing: a row's partial keys are made of its own KV."""


class IndexedResidency(DeviceResidency):
    """A Residency that keeps all KV on the device, and partial keys of it."""

    def __init__(self, shape: KvShape, make_memory: MakeMemory, prepared: PreparedSelection) -> None:
        """Raise what is in OUT_OF_MEMORY, or OSError, without the address space."""
        self.prepared = prepared
        """How drafts choose keys."""
        args = shape.layout, prepared.basis, shape.max_slot_tokens, make_memory
        self.indices = [DraftIndex(*args) for _ in range(shape.num_slots)]
        """The slots' partial keys."""
        super().__init__(shape, make_memory, self.indices)
