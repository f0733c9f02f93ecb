"""Slot tables for tests: tiny, on a manual clock, with memory poisoned by NaN until it is written."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

from baton.clock import Clock
from baton.ids import RequestId
from baton.types import KvLayout, Lease, LeaseRef, SampledToken, TokenRange
from generate_workers.slots import SlotTable
from modeling.kv_buffers import KvBuffer
from transport.kv_sink import ReserveSpec

LAYOUT = KvLayout("weights", num_layers=2, num_kv_heads=1, head_dim=2, dtype="float32")
FIRST = SampledToken(token_id=7)


def poisoned_buffer(layout: KvLayout, tokens: TokenRange) -> KvBuffer:
    """Memory in which every row that nobody wrote shows: NaN spreads to whatever reads it."""
    buffer = KvBuffer(layout, tokens)
    buffer.data.fill_(math.nan)
    return buffer


def make_slots(clock: Clock, *, num_slots: int = 2, max_slot_tokens: int = 12, layout: KvLayout = LAYOUT) -> SlotTable:
    """A table of poisoned slots."""
    return SlotTable(
        layout,
        clock,
        num_slots=num_slots,
        max_slot_tokens=max_slot_tokens,
        endpoint="127.0.0.1:1",
        make_buffer=poisoned_buffer,
    )


def lease(slots: SlotTable, num_tokens: int = 4, capacity_tokens: int = 8, ttl_s: float = 5.0) -> Lease:
    """A lease of the table."""
    return slots.reserve(ReserveSpec(RequestId("r"), 1, num_tokens, capacity_tokens, ttl_s))


def push_zeros(slots: SlotTable, ref: LeaseRef, num_tokens: int) -> None:
    """Writes all of a lease's KV."""
    data = memoryview(bytes(num_tokens * slots.layout.row_bytes))
    with slots.open_push(ref) as target:
        for layer in range(slots.layout.num_layers):
            target.write(layer, TokenRange(0, num_tokens), data)


def push_buffer(slots: SlotTable, ref: LeaseRef, buffer: KvBuffer, tokens: TokenRange) -> None:
    """Writes `tokens` of another buffer into a lease."""
    with slots.open_push(ref) as target:
        for layer in range(slots.layout.num_layers):
            target.write(layer, tokens, buffer.export(layer, tokens))


@contextmanager
def ends_empty(slots: SlotTable) -> Iterator[None]:
    """Within it anything may be held; at the end nothing may, and the ledger balances."""
    yield
    ledger = slots.ledger()
    assert ledger.balances
    assert ledger.is_empty, ledger
