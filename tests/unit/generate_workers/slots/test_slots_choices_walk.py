"""Leases of several choices against a plain model: they claim their slots together, and give them back one by one."""

import asyncio
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule
from hypothesis.strategies import integers, sampled_from

from baton.errors import LeaseExpiredError, ResourceExhaustedError, StaleStampError
from baton.transport.kv_sink import ReserveSpec
from baton.types import LeaseRef, RequestId, SampledToken
from generate_workers.residency.port import KvBytes
from generate_workers.slots.leases import BatchSlot
from tests.support.engines.slot_tables import activated, is_empty, make_slots, push_zeros
from tests.support.manual_clock import ManualClock

NUM_SLOTS = 5
NUM_TOKENS = 4
TTL_S = 5.0


@dataclass(eq=False)
class Request:
    """The model's state of one lease."""

    ref: LeaseRef
    num_choices: int
    deadline_s: float
    state: str = "leased"
    """leased, committed, active, expired or gone."""
    batch_slots: list[BatchSlot] = field(default_factory=list)
    """Rows that have not been released."""
    writer: AbstractContextManager[object] | None = None

    @property
    def num_waiting(self) -> int:
        """Slots that are claimed, and no rows yet."""
        return self.num_choices if self.state in ("leased", "committed") else 0

    @property
    def is_quarantined(self) -> bool:
        """Its first slot is freed, and somebody writes there."""
        in_use = self.num_waiting or any(batch_slot.ref == self.ref for batch_slot in self.batch_slots)
        return self.writer is not None and not in_use


class ChoicesWalk(RuleBasedStateMachine):
    """Every rule does one thing to the table and to the model."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock(start_s=100.0)
        self.slots = make_slots(self.clock, num_slots=NUM_SLOTS)
        self.abandoned = self.slots.changes._abandoned
        self.all: list[Request] = []
        self.num_owed = 0

    def teardown(self) -> None:
        for request in self.all:
            for batch_slot in request.batch_slots:
                self.slots.release(batch_slot.ref)
            self.slots.abort(request.ref)
            if request.writer is not None:
                request.writer.__exit__(None, None, None)
        assert is_empty(self.slots.ledger())

    @rule(target=requests, num_choices=integers(1, 3))
    def reserve(self, num_choices: int) -> object:
        """All slots or none; what is owed to rows that wait stays free."""
        self._expire()
        spec = ReserveSpec(RequestId("r"), 1, NUM_TOKENS, 2 * NUM_TOKENS, TTL_S, num_choices)
        if self._num_free() < num_choices + self.num_owed:
            with pytest.raises(ResourceExhaustedError):
                self.slots.reserve(spec)
            return multiple()
        self.all.append(Request(self.slots.reserve(spec).ref, num_choices, self.clock.now_s() + TTL_S))
        return self.all[-1]

    @rule(of=requests)
    def enter(self, of: Request) -> None:
        """A writer that does not leave at once."""
        self._expire()
        opening = self.slots.open_push(of.ref)
        if of.writer is None and of.state in ("leased", "committed", "active") and self._has_first(of):
            opening.__enter__()
            of.writer, of.deadline_s = opening, self.clock.now_s() + TTL_S

    @rule(of=requests)
    def leave(self, of: Request) -> None:
        if of.writer is not None:
            of.writer.__exit__(None, None, None)
            of.writer = None

    @rule(of=requests)
    def push_and_commit(self, of: Request) -> None:
        self._expire()
        firsts = [SampledToken(choice) for choice in range(of.num_choices)]
        if of.state != "leased":
            if of.state in ("expired", "gone"):
                with pytest.raises((StaleStampError, LeaseExpiredError)):
                    asyncio.run(self.slots.commit(of.ref, firsts, wait_s=0))
            return
        push_zeros(self.slots, of.ref, NUM_TOKENS)
        asyncio.run(self.slots.commit(of.ref, firsts, wait_s=0))
        of.state, of.deadline_s = "committed", self.clock.now_s() + TTL_S

    @rule(of=requests)
    def activate(self, of: Request) -> None:
        """Each choice becomes a row, with its own first token."""
        self._expire()
        if of.state == "committed":
            of.batch_slots = activated(self.slots, of.ref)
            assert [batch_slot.first for batch_slot in of.batch_slots] == [
                SampledToken(choice) for choice in range(of.num_choices)
            ]
            of.state = "active"

    @rule(of=requests, which=integers(0, 2))
    def release(self, of: Request, which: int) -> None:
        """Rows end in any order."""
        if which < len(of.batch_slots):
            self.slots.release(of.batch_slots.pop(which).ref)

    @rule(of=requests)
    def abort(self, of: Request) -> None:
        """Before they are rows, all choices end; afterwards the rows are told to leave."""
        self._expire()
        self.slots.expire()
        self.abandoned.clear()
        self.slots.abort(of.ref)
        assert self.abandoned == ([] if of.num_waiting else [of.ref])
        if of.num_waiting:
            of.state = "gone"

    @rule(num_slots=integers(0, 2))
    def owe(self, num_slots: int) -> None:
        self.slots.owe(num_slots, KvBytes())
        self.num_owed = num_slots

    @rule(seconds=sampled_from([1.0, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def the_ledger_is_the_model(self) -> None:
        self._expire()
        self.slots.expire()
        ledger = self.slots.ledger()
        assert not ledger.imbalance, ledger.imbalance
        assert ledger.num_free == self._num_free()
        assert ledger.num_leased == sum(request.num_waiting for request in self.all)
        assert ledger.num_active == sum(len(request.batch_slots) for request in self.all)
        assert ledger.num_quarantined == sum(request.is_quarantined for request in self.all)

    @invariant()
    def no_slot_is_two_rows(self) -> None:
        taken = [batch_slot.ref.slot for request in self.all for batch_slot in request.batch_slots]
        assert len(set(taken)) == len(taken)

    def _num_free(self) -> int:
        return NUM_SLOTS - sum(each.num_waiting + len(each.batch_slots) + each.is_quarantined for each in self.all)

    def _has_first(self, of: Request) -> bool:
        return bool(of.num_waiting) or any(batch_slot.ref == of.ref for batch_slot in of.batch_slots)

    def _expire(self) -> None:
        for request in self.all:
            if request.num_waiting and request.deadline_s <= self.clock.now_s():
                request.state = "expired"


TestChoicesWalk = ChoicesWalk.TestCase
TestChoicesWalk.settings = settings(max_examples=120, stateful_step_count=40, deadline=None, derandomize=True)
