"""Residency `device`: all KV lies where attention reads it. No KV is fetched or copied.

A Residency for `engine.step_runner`. Home is the device itself, so that every byte counts as both.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from baton.ids import SlotId
from generate_workers.residency.paged_row import MakeMemory, PagedRow
from generate_workers.residency.port import KvBytes, KvShape, StepRows
from generate_workers.residency.traits import POLICIES
from modeling.forward.decoder import SequenceSpan
from modeling.kv.buffers import BufferSpan


@dataclass(frozen=True)
class DeviceStep:
    """A StepKv that has nothing to do between layers."""

    spans: Sequence[SequenceSpan]
    num_bytes_read: int
    turns: None = None
    """No turns: all keys are in place."""


class DeviceRow(PagedRow):
    """A RowKv whose home is the device."""

    @property
    def num_bytes(self) -> KvBytes:
        """Return the committed bytes, counted in both memories."""
        return KvBytes(self.memory.num_bytes, self.memory.num_bytes)


class DeviceResidency:
    """A Residency that keeps all KV on the device."""

    traits = POLICIES["device"]

    def __init__(self, shape: KvShape, make_memory: MakeMemory) -> None:
        """Raise what is in OUT_OF_MEMORY when the slots' address space cannot be had."""
        self.num_link_bytes = 0
        self._shape = shape
        memories = (make_memory(shape.layout, shape.max_slot_tokens) for _ in range(shape.num_slots))
        self._rows = [DeviceRow(shape.layout, memory) for memory in memories]

    def bytes_for(self, num_tokens: int) -> KvBytes:
        """Return the bytes of a row of that many tokens, counted in both memories."""
        num_bytes = self._rows[0].memory.bytes_for(num_tokens)
        return KvBytes(num_bytes, num_bytes)

    def open(self, slot: SlotId, num_tokens: int, capacity_tokens: int) -> DeviceRow:
        """Begin a claim, and return a view of the slot's memory."""
        self._rows[slot].open(num_tokens, capacity_tokens)
        return self._rows[slot]

    def copy(self, source: SlotId, target: SlotId, num_tokens: int) -> None:
        """Copy tokens between two slots within the device."""
        self._rows[target].copy_from(self._rows[source], num_tokens)

    @contextmanager
    def step(self, rows: StepRows) -> Iterator[DeviceStep]:
        """Commit the new tokens, and yield spans over the slots' own memory."""
        spans = []
        for slot, tokens in rows:
            row = self._rows[slot]
            row.memory.commit(tokens)
            spans.append(BufferSpan(row.buffer, tokens))
        yield DeviceStep(spans, self._shape.bytes_read(tokens for _, tokens in rows))

    def close(self) -> None:
        """Do nothing: this policy has no threads."""
