"""Residency `device`: all KV is stored where attention reads it. No KV is fetched or copied.

A Residency for `engine.model_runner`. All bytes count as both `home` and `device` (see `port.KvBytes`). On devices with
their own memory, `generate_workers.residency.paged` is used instead, unless drafts select keys.

Shape suffixes: T tokens, G kv heads, H head dim.
"""

from collections.abc import Sequence

from torch import Tensor

from baton.types import SlotId, TokenRange
from generate_workers.residency.port import KvShape
from generate_workers.residency.row_parts import MakeMemory, PagedKv, RowPart, StoredRow
from generate_workers.residency.steps import InPlaceStep, RowResidency
from generate_workers.residency.traits import POLICIES


class DeviceResidency(RowResidency[StoredRow]):
    """Residency that keeps all KV on the device."""

    traits = POLICIES["device"]

    def __init__(self, shape: KvShape, make_memory: MakeMemory, indices: Sequence[RowPart] = ()) -> None:
        """`indices`: a further RowPart for each slot, which counts only as device memory. Empty: slots hold only KV.
        Raises an error of OUT_OF_MEMORY if the slots' address space cannot be reserved."""
        kvs = [PagedKv(shape.layout, make_memory, shape.max_slot_tokens) for _ in range(shape.num_slots)]
        rows = [StoredRow([kv], [kv, *indices[slot : slot + 1]]) for slot, kv in enumerate(kvs)]
        super().__init__(rows, lambda rows: InPlaceStep(rows, shape.bytes_read(tokens for _, tokens in rows)))

    def kv(self, slot: SlotId, layer: int, tokens: TokenRange) -> Tensor:
        """Return a view `[T, 2, G, H]` of the slot's `tokens`, which must have been written. Engine's thread."""
        return self._rows[slot].kv(layer, tokens)
