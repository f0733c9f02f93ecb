"""What a slot goes through: states, one transition table, the claim that a lease is, and the ledger.

Steps 3 and 7 of a request's way (DESIGN.md, section 4). Plain values without a lock: `slots.SlotTable` owns them.

    FREE -> LEASED -> COMMITTED -> ACTIVE -> FREE
              |           |          |
              +-----------+----------+--> QUARANTINED -> FREE     freed while a writer or reader was still inside

    FREE -> HELD -> ACTIVE -> FREE      of a further choice of a lease: starts and ends with the lease's own slot
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Self

from baton.ids import SlotId, Stamp
from baton.results import KvLedger
from baton.types import Lease, LeaseRef, SampledToken
from generate_workers.residency.port import KvBytes, RowKv
from generate_workers.slots.loop_waiter import LoopWaiter
from generate_workers.slots.memory import KvMemory, Promise
from transport.coverage import Coverage
from transport.kv_sink import ReserveSpec


class SlotState(Enum):
    """Where a slot is in its life."""

    FREE = "free"
    """Holds nothing; may be claimed."""
    LEASED = "leased"
    """KV is being pushed; timed."""
    COMMITTED = "committed"
    """Every byte and the first tokens are in; waits for its row; timed."""
    HELD = "held"
    """For a further choice of a leased or committed slot, and as long as that."""
    ACTIVE = "active"
    """A row of the batch; not timed, the row's end frees it."""
    QUARANTINED = "quarantined"
    """Freed, but a writer or reader has not left: its memory is held until then."""


_LEASED = (SlotState.LEASED, SlotState.COMMITTED, SlotState.HELD)
"""Claimed, and not yet a row."""


class SlotMove(Enum):
    """What happens to a slot."""

    LEASE = "lease"
    HOLD = "hold"
    OCCUPY = "occupy"
    """Claimed by a row that prefills locally."""
    COMMIT = "commit"
    ACTIVATE = "activate"
    FREE = "free"
    QUARANTINE = "quarantine"
    """As FREE, with writers or readers inside."""
    EMPTY = "empty"
    """The last of them has left a quarantined slot."""


TRANSITIONS: Mapping[tuple[SlotState, SlotMove], SlotState] = {
    (SlotState.FREE, SlotMove.LEASE): SlotState.LEASED,
    (SlotState.FREE, SlotMove.OCCUPY): SlotState.ACTIVE,
    (SlotState.FREE, SlotMove.HOLD): SlotState.HELD,
    (SlotState.LEASED, SlotMove.COMMIT): SlotState.COMMITTED,
    (SlotState.COMMITTED, SlotMove.ACTIVATE): SlotState.ACTIVE,
    (SlotState.HELD, SlotMove.ACTIVATE): SlotState.ACTIVE,
    (SlotState.LEASED, SlotMove.FREE): SlotState.FREE,
    (SlotState.COMMITTED, SlotMove.FREE): SlotState.FREE,
    (SlotState.HELD, SlotMove.FREE): SlotState.FREE,
    (SlotState.ACTIVE, SlotMove.FREE): SlotState.FREE,
    (SlotState.LEASED, SlotMove.QUARANTINE): SlotState.QUARANTINED,
    (SlotState.COMMITTED, SlotMove.QUARANTINE): SlotState.QUARANTINED,
    (SlotState.ACTIVE, SlotMove.QUARANTINE): SlotState.QUARANTINED,
    (SlotState.QUARANTINED, SlotMove.EMPTY): SlotState.FREE,
}
"""All legal moves; any other is a bug of ours."""


class Standing(Enum):
    """What a row that came with a lease may do about it now."""

    PENDING = "pending"
    """Wait: KV is still on its way."""
    READY = "ready"
    """Join: committed."""
    RUNNING = "running"
    """It has joined."""
    EXPIRED = "expired"
    """The lease was not renewed in time."""
    GONE = "gone"
    """The lease was aborted, or never was."""


STANDINGS: Mapping[SlotState, Standing] = {SlotState.LEASED: Standing.PENDING, SlotState.COMMITTED: Standing.READY}
"""Of leases whose rows have not joined."""


@dataclass
class Claim:
    """One life of a slot: made when it is claimed, dropped when it is freed. Owned by the SlotTable."""

    ref: LeaseRef
    memory: Promise
    coverage: Coverage
    """What is there of the first `num_cached` tokens."""
    num_tokens: int
    """Tokens that the claim was made for."""
    num_cached: int
    """Those whose KV is pushed, or copied from blocks: positions [0, num_cached). The row computes the others."""
    ttl_s: float
    deadline_s: float
    """When the claim ends by itself (Clock.now_s()), while it is LEASED or COMMITTED."""
    firsts: tuple[SampledToken, ...] = ()
    """Each choice's first token; known from commit on. None where the row computes it."""
    held: "tuple[Slot, ...]" = ()
    """The slots of further choices, until they are rows: they end with this claim."""
    expired: bool = False
    """Ended because nobody renewed it."""
    waiters: list[LoopWaiter] = field(default_factory=list)
    """Commits that wait for bytes: woken when all are in, and when the claim ends."""

    def lease(self, request: ReserveSpec, endpoint: str, num_present_tokens: int) -> Lease:
        """As whoever reserved it is told."""
        return Lease(
            ref=self.ref,
            request_id=request.request_id,
            attempt=request.attempt,
            num_tokens=request.num_tokens,
            endpoint=endpoint,
            ttl_s=request.ttl_s,
            num_present_tokens=num_present_tokens,
        )

    def wake_all(self) -> None:
        """Wakes all waiting commits."""
        for waiter in self.waiters:
            waiter.wake()


class Slot:
    """One slot: its state, its present claim, and how many are inside. Owned by the SlotTable."""

    def __init__(self, number: SlotId, memory: KvMemory) -> None:
        self.number = number
        self._memory = memory
        self.state = SlotState.FREE
        self.num_inside = 0
        """Writers and readers of its memory."""
        self.claim: Claim | None = None
        self.last_expired: Stamp | None = None
        """The stamp of the claim that ended last, if it ended by expiry."""

    @property
    def is_timed(self) -> bool:
        return self.state in (SlotState.LEASED, SlotState.COMMITTED)

    def begin(self, claim: Claim, move: SlotMove) -> None:
        """FREE -> LEASED or ACTIVE."""
        self._move(move)
        self.claim = claim
        self.last_expired = None

    def advance(self, move: SlotMove) -> None:
        """COMMIT or ACTIVATE."""
        self._move(move)

    def end(self, *, expired: bool = False) -> None:
        """Ends the claim: the stamp is refused from now on, and memory goes when nobody is inside any more."""
        claim = self.claim
        assert claim is not None
        claim.expired = expired
        self.last_expired = claim.ref.stamp if expired else None
        claim.wake_all()
        for slot in claim.held:
            slot.end()
        if self.num_inside:
            self._move(SlotMove.QUARANTINE)
        else:
            self._move(SlotMove.FREE)
            self._drop()

    def leave(self) -> bool:
        """One writer or reader has left; returns whether that freed the slot."""
        assert self.num_inside > 0
        self.num_inside -= 1
        if self.state is not SlotState.QUARANTINED or self.num_inside:
            return False
        self._move(SlotMove.EMPTY)
        self._drop()
        return True

    def _drop(self) -> None:
        assert self.claim is not None
        self._memory.give_back(self.claim.memory)
        self.claim = None

    def _move(self, move: SlotMove) -> None:
        target = TRANSITIONS.get((self.state, move))
        assert target is not None, f"slot {self.number} cannot {move.value} while {self.state.value}"
        self.state = target


@dataclass(frozen=True)
class Seat:
    """A slot that has become a row: what the engine needs of it. Its memory is the table's until `release`."""

    ref: LeaseRef
    row: RowKv
    first: SampledToken | None
    """The choice's first token, when the KV was pushed."""
    num_cached: int = 0
    """Tokens whose KV is in place."""


@dataclass(frozen=True)
class SlotLedger:
    """How many slots are in which state, and the memory they hold: it balances at all times."""

    num_slots: int
    num_free: int
    num_leased: int
    """LEASED, COMMITTED or HELD: claimed, not yet a row."""
    num_active: int
    num_quarantined: int
    num_bytes_held: int
    """Of KV, at home, committed to the page."""
    num_device_bytes: int
    """Of KV on the device; where home is the device, the same bytes."""
    kv: KvLedger
    """At home: what is promised to the slots in each state, held or yet to be, and by the memory's own book free."""

    @classmethod
    def of(cls, slots: Sequence[Slot], memory: KvMemory) -> Self:
        """What these slots of that memory hold now."""
        promises = [slot.claim.memory for slot in slots if slot.claim]
        held = sum((each.row.num_bytes for each in promises), KvBytes())
        counts, promised = Counter(slot.state for slot in slots), Counter[SlotState]()
        for slot in slots:
            promised[slot.state] += slot.claim.memory.num_bytes.home if slot.claim else 0
        return cls(
            num_slots=len(slots),
            num_free=counts[SlotState.FREE],
            num_leased=sum(counts[each] for each in _LEASED),
            num_active=counts[SlotState.ACTIVE],
            num_quarantined=counts[SlotState.QUARANTINED],
            num_bytes_held=held.home,
            num_device_bytes=held.device,
            kv=KvLedger(
                num_bytes=memory.limits.kv_bytes,
                num_bytes_free=memory.num_bytes_free,
                num_bytes_leased=sum(promised[each] for each in _LEASED),
                num_bytes_active=promised[SlotState.ACTIVE],
                num_bytes_quarantined=promised[SlotState.QUARANTINED],
            ),
        )

    @property
    def num_bytes_promised(self) -> int:
        """At home: what is held, and what the present rows may come to hold without asking."""
        return self.kv.num_bytes_taken

    @property
    def imbalance(self) -> str:
        """What does not balance, for people; empty when every slot is counted once, every promised byte belongs to a
        slot that is not free, and not more is held."""
        states = (self.num_leased, self.num_active, self.num_quarantined)
        promised = (self.kv.num_bytes_leased, self.kv.num_bytes_active, self.kv.num_bytes_quarantined)
        if self.num_free + sum(states) != self.num_slots:
            return f"{self.num_free} free and {sum(states)} taken slots are not the {self.num_slots} that there are"
        if self.kv.imbalance:
            return self.kv.imbalance
        if [num_slots > 0 for num_slots in states] != [num_bytes > 0 for num_bytes in promised]:
            return f"{states} slots leased, active, quarantined are promised {promised} bytes"
        if self.num_bytes_held > sum(promised):
            return f"{self.num_bytes_held} bytes are held of {sum(promised)} promised"
        return ""

    @property
    def balances(self) -> bool:
        """Whether nothing is amiss."""
        return not self.imbalance

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held."""
        return self.num_free == self.num_slots and self.num_bytes_held == self.num_device_bytes == 0
