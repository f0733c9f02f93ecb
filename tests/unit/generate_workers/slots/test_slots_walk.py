"""A random walk over everything that can happen to slots, checked against a model a few lines long."""

import asyncio
import dataclasses
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule
from hypothesis.strategies import integers, sampled_from

from baton.errors import IncompletePushError, LeaseError, LeaseExpiredError, ResourceExhaustedError, StaleStampError
from baton.transport.kv_sink import ReserveSpec
from baton.types import LeaseRef, RequestId, TokenRange
from generate_workers.slots.kv_memory import MemoryLimits
from generate_workers.slots.leases import KvLedger, SlotLedger
from generate_workers.slots.slot_access import SlotReader, SlotWriter
from generate_workers.slots.table import SlotTable
from tests.support.engines.slot_tables import (
    FIRST,
    Standing,
    activated,
    is_empty,
    lease,
    make_slots,
    page_bytes,
    standing,
)
from tests.support.engines.slot_tables import LAYOUT as SMALL
from tests.support.manual_clock import ManualClock

LAYOUT = dataclasses.replace(SMALL, num_kv_heads=2, head_dim=128)
"""2048 bytes a token and layer: two tokens fill a page."""
NUM_SLOTS = 4
NUM_TOKENS = 4
NUM_PRESENT = 2
CAPACITY = 8
GROWTH = 2
LIMIT = 3 * page_bytes(NUM_TOKENS + GROWTH, LAYOUT) + page_bytes(1, LAYOUT)
"""Memory runs out before slots do."""
PIECE = memoryview(bytes(NUM_TOKENS * LAYOUT.row_bytes))
STANDINGS = {
    "leased": Standing.PENDING,
    "committed": Standing.READY,
    "active": Standing.RUNNING,
    "abandoned": Standing.RUNNING,
    "expired": Standing.EXPIRED,
    "gone": Standing.GONE,
}


@dataclass(eq=False)
class Life:
    """The model's state of one claim."""

    ref: LeaseRef
    state: str
    ttl_s: float
    deadline_s: float
    layers: set[int] = field(default_factory=set)
    num_cached: int = 0
    """Tokens of a row."""
    num_promised: int = NUM_TOKENS + GROWTH
    writers: list[tuple[AbstractContextManager[SlotWriter], SlotWriter]] = field(default_factory=list)
    readers: list[SlotReader] = field(default_factory=list)
    """Readers that copy the row's KV; the row stops growing with the first of them."""
    is_local: bool = False
    """Leased to begin with what is at hand: the first NUM_PRESENT tokens."""

    @property
    def is_present(self) -> bool:
        return self.state not in ("expired", "gone")

    @property
    def is_row(self) -> bool:
        return self.state in ("active", "abandoned")

    @property
    def has_anybody(self) -> bool:
        """Whether a writer or reader is inside."""
        return bool(self.writers or self.readers)

    @property
    def tokens(self) -> TokenRange:
        """Tokens that are written."""
        return TokenRange(0, NUM_PRESENT if self.is_local else NUM_TOKENS)

    @property
    def piece(self) -> memoryview:
        """Bytes to write for one layer."""
        return PIECE[: len(self.tokens) * LAYOUT.row_bytes]

    @property
    def num_bytes(self) -> int:
        """Bytes that are held."""
        pushed = len(self.layers) * page_bytes(self.tokens.end, LAYOUT) // LAYOUT.num_layers
        return max(page_bytes(self.num_cached, LAYOUT), pushed)


class SlotWalk(RuleBasedStateMachine):
    """Every rule does one thing to the table and to the model; both must agree on what came of it."""

    lives = Bundle("lives")

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock(start_s=100.0)
        self.slots: SlotTable = make_slots(
            self.clock,
            num_slots=NUM_SLOTS,
            layout=LAYOUT,
            limits=MemoryLimits(LIMIT),
            growth_tokens=GROWTH,
        )
        self.all: list[Life] = []
        self.loop = asyncio.new_event_loop()

    def teardown(self) -> None:
        """Whatever happened, everything can be given back."""
        self.slots.expire()
        for life in self.all:
            if life.is_row:
                self.slots.release(life.ref)
            self.slots.abort(life.ref)
            while life.writers:
                life.writers.pop()[0].__exit__(None, None, None)
            while life.readers:
                life.readers.pop().close()
        self.loop.close()
        assert is_empty(self.slots.ledger())

    @rule(target=lives, ttl_s=sampled_from([2.0, 5.0]))
    def reserve(self, ttl_s: float) -> object:
        if not self._has_room():
            with pytest.raises(ResourceExhaustedError):
                lease(self.slots, NUM_TOKENS, CAPACITY, ttl_s)
            return multiple()
        return self._born(lease(self.slots, NUM_TOKENS, CAPACITY, ttl_s).ref, "leased", ttl_s)

    @rule(target=lives)
    def reserve_for_local_prefill(self) -> object:
        spec = ReserveSpec(RequestId("r"), 1, NUM_TOKENS, CAPACITY, 5.0, prefills_locally=True)
        if not self._has_room():
            with pytest.raises(ResourceExhaustedError):
                self.slots.reserve(spec, NUM_PRESENT)
            return multiple()
        life = self._born(self.slots.reserve(spec, NUM_PRESENT).ref, "leased", 5.0)
        life.is_local = True
        return life

    @rule(target=lives)
    def occupy(self) -> object:
        has_room = self._has_room()
        batch_slots = self.slots.occupy(NUM_TOKENS, CAPACITY)
        assert (batch_slots is not None) == has_room
        return multiple() if batch_slots is None else self._born(batch_slots[0].ref, "active", float("inf"))

    @rule(life=lives)
    def open_writer(self, life: Life) -> None:
        opening = self.slots.open_push(life.ref)
        if self._refused(life):
            with pytest.raises(self._refusal(life)):
                opening.__enter__()
        else:
            life.writers.append((opening, opening.__enter__()))
            self._touch(life)

    @rule(life=lives)
    def close_writer(self, life: Life) -> None:
        if life.writers:
            life.writers.pop(0)[0].__exit__(None, None, None)

    @rule(life=lives, layer=integers(0, LAYOUT.num_layers - 1))
    def write(self, life: Life, layer: int) -> None:
        if not life.writers or life.ttl_s == float("inf"):
            return
        write = life.writers[0][1].copy_in
        if self._refused(life):
            with pytest.raises(self._refusal(life)):
                write(layer, life.tokens, life.piece)
        else:
            assert write(layer, life.tokens, life.piece) is (layer not in life.layers)
            life.layers.add(layer)
            self._touch(life)

    @rule(life=lives, ttl_s=sampled_from([1.0, 10.0]))
    def renew(self, life: Life, ttl_s: float) -> None:
        if life.ttl_s == float("inf"):
            return
        if self._refused(life):
            with pytest.raises(self._refusal(life)):
                self.slots.renew(life.ref, ttl_s)
        else:
            self.slots.renew(life.ref, ttl_s)
            life.ttl_s = ttl_s
            self._touch(life)

    @rule(life=lives)
    def commit(self, life: Life) -> None:
        if life.ttl_s == float("inf"):
            return
        committing = self.slots.commit(life.ref, [FIRST], wait_s=0)
        if self._refused(life):
            with pytest.raises(self._refusal(life)):
                self.loop.run_until_complete(committing)
        elif len(life.layers) < LAYOUT.num_layers:
            with pytest.raises(IncompletePushError):
                self.loop.run_until_complete(committing)
        elif life.is_local:
            with pytest.raises(LeaseError, match="prefilled by its own stream"):
                self.loop.run_until_complete(committing)
        else:
            assert self.loop.run_until_complete(committing) == NUM_TOKENS * LAYOUT.token_bytes
            if life.state == "leased":
                life.state = "committed"
                self._touch(life)

    @rule(life=lives)
    def complete_locally(self, life: Life) -> None:
        self._expire()
        if life.is_local and life.state == "leased" and len(life.layers) == LAYOUT.num_layers:
            self.slots.complete_locally(life.ref)
            life.state = "committed"
            self._touch(life)

    @rule(life=lives)
    def activate(self, life: Life) -> None:
        self._expire()
        if life.state == "committed":
            [batch_slot] = activated(self.slots, life.ref)
            assert (batch_slot.first, batch_slot.num_cached) == (None if life.is_local else FIRST, life.tokens.end)
            life.state, life.num_cached = "active", life.tokens.end

    @rule(life=lives)
    def open_reader(self, life: Life) -> None:
        if life.is_row:
            life.readers.append(self.slots.open_read(life.ref))

    @rule(life=lives)
    def read(self, life: Life) -> None:
        if not life.readers or not life.num_cached:
            return
        if self._refused(life):
            with pytest.raises(self._refusal(life)):
                life.readers[0].export(0, TokenRange(0, life.num_cached))
        else:
            data = life.readers[0].export(0, TokenRange(0, life.num_cached))
            assert bytes(data) == bytes(life.num_cached * LAYOUT.row_bytes)

    @rule(life=lives)
    def close_reader(self, life: Life) -> None:
        if life.readers:
            life.readers.pop(0).close()

    @rule(life=lives, num_tokens=integers(1, CAPACITY))
    def extend(self, life: Life, num_tokens: int) -> None:
        if not life.is_row:
            return
        others = self._promised_bytes() - page_bytes(life.num_promised, LAYOUT)
        fitting = [each for each in (CAPACITY, num_tokens) if others + page_bytes(each, LAYOUT) <= LIMIT]
        is_enough = num_tokens <= life.num_promised
        missing = self.slots.extend(life.ref.slot, num_tokens)
        assert (missing is None) == (is_enough or bool(fitting))
        if missing is not None:
            assert missing.home == page_bytes(num_tokens, LAYOUT) - page_bytes(life.num_promised, LAYOUT)
        elif not is_enough:
            life.num_promised = fitting[0]

    @rule(life=lives)
    def run(self, life: Life) -> None:
        if life.is_row and life.num_cached < life.num_promised and not life.readers:
            new = TokenRange(life.num_cached, life.num_cached + 1)
            with self.slots.memory.residency.step([(life.ref.slot, new)]) as step:
                for layer in range(LAYOUT.num_layers):
                    step.spans[0].own(layer).zero_()
            life.num_cached = new.end

    @rule(life=lives)
    def release(self, life: Life) -> None:
        if life.is_row:
            self.slots.release(life.ref)
            life.state = "gone"

    @rule(life=lives)
    def abort(self, life: Life) -> None:
        self._expire()
        self.slots.expire()
        self.slots.abort(life.ref)
        if life.is_row:
            life.state = "abandoned"
        elif life.is_present:
            life.state = "gone"

    @rule(seconds=sampled_from([0.5, 1.0, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def the_ledger_is_the_model(self) -> None:
        self.slots.expire()
        self._expire()
        states = [life.state for life in self.all]
        num_quarantined = sum(not life.is_present and life.has_anybody for life in self.all)
        num_leased = states.count("leased") + states.count("committed")
        num_active = sum(life.is_row for life in self.all)
        num_free = NUM_SLOTS - num_leased - num_active - num_quarantined
        num_bytes = sum(life.num_bytes for life in self._holding())
        promised = self._promised_bytes()
        leased = self._promised_bytes("leased", "committed")
        active = self._promised_bytes("active", "abandoned")
        ledger = self.slots.ledger()
        slots = (NUM_SLOTS, num_free, num_leased, num_active, num_quarantined)
        kv = KvLedger(LIMIT, LIMIT - promised, leased, active, promised - leased - active)
        assert ledger == SlotLedger(*slots, num_bytes, num_bytes, kv)
        assert promised == self.slots.memory.promised.home <= LIMIT
        assert not ledger.imbalance

    @invariant()
    def every_lease_stands_as_the_model_says(self) -> None:
        self.slots.expire()
        self._expire()
        for life in self.all:
            assert standing(self.slots, life.ref) is STANDINGS[life.state]

    @invariant()
    def no_two_lives_share_a_stamp_or_a_taken_slot(self) -> None:
        assert len({life.ref.stamp for life in self.all}) == len(self.all)
        taken = [life.ref.slot for life in self.all if life.is_present or life.has_anybody]
        assert len(set(taken)) == len(taken)

    def _born(self, ref: LeaseRef, state: str, ttl_s: float) -> Life:
        life = Life(ref, state, ttl_s, self.clock.now_s() + ttl_s)
        for other in self.all:
            if other.ref.slot == ref.slot and other.state == "expired":
                other.state = "gone"  # the slot remembers only its last life
        self.all.append(life)
        return life

    def _touch(self, life: Life) -> None:
        life.deadline_s = self.clock.now_s() + life.ttl_s

    def _expire(self) -> None:
        for life in self.all:
            if life.state in ("leased", "committed") and life.deadline_s <= self.clock.now_s():
                life.state = "expired"

    def _num_free(self) -> int:
        self._expire()
        return NUM_SLOTS - sum(life.is_present or life.has_anybody for life in self.all)

    def _holding(self) -> list[Life]:
        return [life for life in self.all if life.is_present or life.has_anybody]

    def _promised_bytes(self, *states: str) -> int:
        """To claims in these states; in all, if none is named."""
        promised = [life for life in self._holding() if not states or life.state in states]
        return sum(page_bytes(life.num_promised, LAYOUT) for life in promised)

    def _has_room(self) -> bool:
        more = page_bytes(NUM_TOKENS + GROWTH, LAYOUT)
        return self._num_free() > 0 and self._promised_bytes() + more <= LIMIT

    def _refused(self, life: Life) -> bool:
        self._expire()
        return not life.is_present

    def _refusal(self, life: Life) -> type[Exception]:
        return LeaseExpiredError if life.state == "expired" else StaleStampError


TestSlotWalk = SlotWalk.TestCase
TestSlotWalk.settings = settings(max_examples=150, stateful_step_count=50, deadline=None, derandomize=True)
