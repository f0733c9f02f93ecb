"""A slot's states: the table of transitions is the whole truth, and the ledger balances."""

import pytest

from baton.transport.coverage import Coverage
from baton.types import LeaseRef, SlotId, Stamp
from generate_workers.slots.leases import TRANSITIONS, KvLedger, Slot, SlotClaim, SlotLedger, SlotMove, SlotState
from tests.support.engines.slot_tables import make_memory


def claimed_slot(move: SlotMove) -> Slot:
    memory = make_memory()
    slot = Slot(SlotId(0), memory)
    [promise] = memory.promise([slot.number], 4, 8)
    slot.begin(SlotClaim(LeaseRef(SlotId(0), Stamp(1)), promise, Coverage(2, 4), 4, 4, 5.0, 5.0), move)
    return slot


def test_every_state_can_be_left_and_be_reached() -> None:
    assert {state for state, _ in TRANSITIONS} == set(SlotState)
    assert set(TRANSITIONS.values()) == set(SlotState)


def test_every_move_is_used() -> None:
    assert {move for _, move in TRANSITIONS} == set(SlotMove)


def test_only_an_empty_quarantine_or_a_freed_claim_leads_to_free() -> None:
    moves = {move for (_, move), target in TRANSITIONS.items() if target is SlotState.FREE}
    assert moves == {SlotMove.FREE, SlotMove.EMPTY}


def test_a_move_that_is_not_in_the_table_is_a_bug() -> None:
    slot = claimed_slot(SlotMove.LEASE)
    with pytest.raises(AssertionError, match="cannot activate while leased"):
        slot.move(SlotMove.ACTIVATE)
    assert slot.state is SlotState.LEASED


def test_a_claim_without_writers_ends_at_once() -> None:
    slot = claimed_slot(SlotMove.OCCUPY)
    slot.end()
    assert (slot.state, slot.claim) == (SlotState.FREE, None)


def test_memory_is_held_until_the_last_writer_leaves() -> None:
    slot = claimed_slot(SlotMove.LEASE)
    slot.num_inside = 2
    slot.end()
    assert not slot.leave()
    assert (slot.state.value, slot.claim is None) == ("quarantined", False)
    assert slot.leave()
    assert (slot.state.value, slot.claim is None) == ("free", True)


def test_a_writer_that_leaves_a_living_claim_frees_nothing() -> None:
    slot = claimed_slot(SlotMove.LEASE)
    slot.num_inside = 1
    assert not slot.leave()
    assert slot.state is SlotState.LEASED


def kv(free: int, leased: int = 0, active: int = 0, quarantined: int = 0) -> KvLedger:
    """A ledger of 64 bytes."""
    return KvLedger(64, free, leased, active, quarantined)


@pytest.mark.parametrize(
    ("ledger", "imbalance"),
    [
        (SlotLedger(4, 4, 0, 0, 0, 0, 0, kv(64)), ""),
        (SlotLedger(4, 1, 1, 1, 1, 30, 30, kv(34, 10, 10, 10)), ""),
        (SlotLedger(4, 1, 1, 1, 1, 0, 0, kv(34, 10, 10, 10)), ""),
        (SlotLedger(4, 1, 1, 1, 0, 0, 0, kv(34, 10, 20)), "1 free and 2 taken slots do not add up to 4"),
        (SlotLedger(4, 4, 0, 0, 0, 64, 64, kv(64)), "64 bytes are held of 0 promised"),
        (SlotLedger(4, 3, 1, 0, 0, 21, 21, kv(44, 20)), "21 bytes are held of 20 promised"),
        (SlotLedger(4, 4, 0, 0, 0, 0, 0, kv(54, active=10)), "(0, 0, 0) slots leased, active, quarantined"),
        (SlotLedger(4, 3, 1, 0, 0, 0, 0, kv(64)), "(1, 0, 0) slots leased, active, quarantined"),
        (SlotLedger(4, 3, 1, 0, 0, 0, 0, kv(54, active=10)), "(1, 0, 0) slots leased, active, quarantined"),
        (SlotLedger(4, 3, 1, 0, 0, 0, 0, kv(54, 11)), "54 bytes free and 11 promised are not the 64"),
        (SlotLedger(4, 3, 1, 0, 0, 0, 0, kv(-1, 65)), "-1 bytes free and 65 promised are not the 64"),
    ],
)
def test_ledger_counts_each_slot_once_and_memory_with_it(ledger: SlotLedger, imbalance: str) -> None:
    assert ledger.imbalance.startswith(imbalance)
    assert bool(ledger.imbalance) is bool(imbalance)


def test_the_parts_of_the_memory_are_the_whole() -> None:
    assert KvLedger(10, 4, 3, 2, 1).imbalance == ""
    assert KvLedger(10, 5, 3, 2, 1).imbalance == "5 bytes free and 6 promised are not the 10 of KV"
    assert KvLedger(5, -1, 3, 2, 1).imbalance
