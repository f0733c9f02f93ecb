"""Residency policy `device`: all KV is stored in the memory from which attention reads it. KV is never fetched or
copied.

`engine.model_runner` uses the class DeviceResidency. Each byte of KV counts twice in `port.KvBytes`: as `home`, the
memory that stores KV between steps, and as `device` memory. For a device with its own memory,
`generate_workers.residency.paged` is used instead. Only if drafts select keys, DeviceResidency is also used there.

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
    """Residency policy that stores all KV in the device's memory."""

    traits = POLICIES["device"]

    def __init__(self, shape: KvShape, make_memory: MakeMemory, indices: Sequence[RowPart] = ()) -> None:
        """Make the storage of all slots. `indices` has one additional RowPart (part of a slot's memory) for each slot.
        In KvBytes, the RowPart's bytes count only as device memory. KV counts both as device memory and as `home`, the
        memory that stores KV between steps. If `indices` is empty, slots hold only KV. Raises one of the exceptions in
        OUT_OF_MEMORY if the address space of the slots cannot be reserved."""
        kvs = [PagedKv(shape.layout, make_memory, shape.max_slot_tokens) for _ in range(shape.num_slots)]
        rows = [StoredRow([kv], [kv, *indices[slot : slot + 1]]) for slot, kv in enumerate(kvs)]
        super().__init__(rows, lambda rows: InPlaceStep(rows, shape.bytes_read(tokens for _, tokens in rows)))

    def kv(self, slot: SlotId, layer: int, tokens: TokenRange) -> Tensor:
        """Return a view of the KV of `tokens` in one layer of a slot: `[T, 2, G, H]` (tokens, K and V, kv heads, head
        dim). The tokens must have been written. Called on the engine's thread."""
        return self._rows[slot].kv(layer, tokens)
