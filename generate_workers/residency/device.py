"""Residency `device`: all KV lies where attention reads it. No KV is fetched or copied.

A Residency for `engine.step_runner`. Home is the device itself, so that every byte counts as both.
"""

from generate_workers.residency.port import KvShape
from generate_workers.residency.rows import MakeMemory, PagedKv, StoredRow
from generate_workers.residency.steps import RowResidency, RowStep
from generate_workers.residency.traits import POLICIES


class DeviceStep(RowStep[StoredRow]):
    """A StepKv that has nothing to do between layers."""

    @property
    def turns(self) -> None:
        """Return None: all keys are in place."""


class DeviceResidency(RowResidency[StoredRow]):
    """A Residency that keeps all KV on the device."""

    traits = POLICIES["device"]

    def __init__(self, shape: KvShape, make_memory: MakeMemory) -> None:
        """Raise what is in OUT_OF_MEMORY when the slots' address space cannot be had."""
        kvs = [PagedKv(shape.layout, make_memory, shape.max_slot_tokens) for _ in range(shape.num_slots)]
        rows = [StoredRow([kv], [kv]) for kv in kvs]
        super().__init__(rows, lambda rows: DeviceStep(rows, shape.bytes_read(tokens for _, tokens in rows)))
