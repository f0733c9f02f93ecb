"""Life cycle of a slot: its states, the transition table, the claim that a lease refers to, and the ledger.

These values have no lock of their own: `slots.table.SlotTable` owns them and guards them with its lock.

    FREE -> LEASED -> COMMITTED -> ACTIVE -> FREE
              |           |          |
              +-----------+----------+--> QUARANTINED -> FREE     freed while a writer or reader was using the memory

    FREE -> HELD -> ACTIVE -> FREE      slot of a further choice of a lease: begins and ends with the lease's own slot
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Self

from baton.transport.coverage import Coverage
from baton.types import LeaseRef, SampledToken, SlotId, Stamp, TokenRange
from generate_workers.residency.port import KvBytes, RowKv
from generate_workers.slots.kv_memory import KvMemory, Promise


class SlotState(Enum):
    """Stage of a slot's life cycle."""

    FREE = "free"
    """The slot has no claim and may be claimed."""
    LEASED = "leased"
    """KV is being pushed. The lease ends at its deadline unless it is renewed."""
    COMMITTED = "committed"
    """All KV and the first tokens have arrived, and the slot waits to join the batch. The lease still ends at its
    deadline."""
    HELD = "held"
    """The slot is reserved for a further choice of a leased or committed slot, and is freed together with that slot."""
    ACTIVE = "active"
    """The slot holds a sequence of the batch. It has no deadline: it is freed when the sequence ends."""
    QUARANTINED = "quarantined"
    """The slot was freed while a writer or reader was using its memory. The memory is held until the last of them has
    ended."""


_LEASED = (SlotState.LEASED, SlotState.COMMITTED, SlotState.HELD)
"""States of a slot that is claimed and has not joined the batch."""


class SlotMove(Enum):
    """Event that moves a slot from one state to another."""

    LEASE = "lease"
    HOLD = "hold"
    OCCUPY = "occupy"
    """A sequence that is prefilled locally claims the slot."""
    COMMIT = "commit"
    ACTIVATE = "activate"
    FREE = "free"
    QUARANTINE = "quarantine"
    """The slot is freed while writers or readers use its memory."""
    EMPTY = "empty"
    """The last writer or reader of a quarantined slot ends."""


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
"""All legal moves. Any other move is a bug."""


@dataclass
class SlotClaim:
    """Claim on a slot, from the moment when the slot is claimed until it is freed. Owned by the SlotTable."""

    ref: LeaseRef
    memory: Promise
    coverage: Coverage
    """Pieces of the first `num_cached` tokens received so far, including pieces that are still being copied to the
    device."""
    num_tokens: int
    """Number of tokens for which the claim was made."""
    num_cached: int
    """Number of tokens whose KV is pushed or copied from blocks: positions [0, num_cached). The engine computes the
    other tokens."""
    ttl_s: float
    deadline_s: float
    """Time (Clock.now_s()) at which the claim expires while it is LEASED or COMMITTED."""
    firsts: tuple[SampledToken, ...] = ()
    """First token of each choice, set when the lease is committed. Empty if the engine computes these tokens."""
    held: "tuple[Slot, ...]" = ()
    """Slots of the lease's further choices until they join the batch. They end with this claim."""
    uploading: set[tuple[int, TokenRange]] = field(default_factory=set)
    """Parts of received pieces, as (layer, tokens), that are still being copied to the device. Each part counts as a
    writer of the slot."""
    failure: str = ""
    """Error that ended the claim because a piece could not be copied to the device; empty if there was none."""
    expired: bool = False
    """True if the claim ended because it was not renewed in time."""
    waiters: list[Future[None]] = field(default_factory=list)
    """Futures of commits that wait for KV. They are set done and dropped when all KV is in place or the claim ends."""

    @property
    def is_whole(self) -> bool:
        """Return whether all KV of the first `num_cached` tokens is in place."""
        return self.coverage.complete and not self.uploading

    def wake_all(self) -> None:
        while self.waiters:
            self.waiters.pop().set_result(None)


class Slot:
    """Slot: its state, its current claim, and the number of writers and readers of its memory. Owned by the
    SlotTable."""

    def __init__(self, number: SlotId, memory: KvMemory) -> None:
        self.number = number
        self._memory = memory
        self.state = SlotState.FREE
        self.num_inside = 0
        """Number of writers and readers of the slot's memory, plus number of pieces that are being copied to it."""
        self.claim: SlotClaim | None = None
        self.last_expired: Stamp | None = None
        """Stamp of the latest ended claim if that claim expired, else None."""

    @property
    def is_timed(self) -> bool:
        return self.state in (SlotState.LEASED, SlotState.COMMITTED)

    def begin(self, claim: SlotClaim, move: SlotMove) -> None:
        """Start a claim on a free slot: FREE -> LEASED, HELD or ACTIVE."""
        self.move(move)
        self.claim = claim
        self.last_expired = None

    def end(self, *, expired: bool = False) -> None:
        """End the claim. Its stamp is refused from now on. Its memory is freed when no writer or reader uses it any
        more."""
        claim = self.claim
        assert claim is not None
        claim.expired = expired
        self.last_expired = claim.ref.stamp if expired else None
        claim.wake_all()
        for slot in claim.held:
            slot.end()
        if self.num_inside:
            self.move(SlotMove.QUARANTINE)
        else:
            self.move(SlotMove.FREE)
            self._drop()

    def leave(self) -> bool:
        """Decrement the number of writers and readers. Return whether this freed the slot."""
        assert self.num_inside > 0
        self.num_inside -= 1
        if self.state is not SlotState.QUARANTINED or self.num_inside:
            return False
        self.move(SlotMove.EMPTY)
        self._drop()
        return True

    def _drop(self) -> None:
        assert self.claim is not None
        self._memory.give_back(self.claim.memory)
        self.claim = None

    def move(self, move: SlotMove) -> None:
        """Change the state as the transition table defines for this move. Claims calls this for COMMIT and ACTIVATE."""
        target = TRANSITIONS.get((self.state, move))
        assert target is not None, f"slot {self.number} cannot {move.value} while {self.state.value}"
        self.state = target


@dataclass(frozen=True)
class BatchSlot:
    """Slot of a sequence that joins the batch. The SlotTable owns the slot's memory; the sequence uses it until
    `release`."""

    ref: LeaseRef
    row: RowKv
    first: SampledToken | None
    """First token of the choice if its KV was pushed, else None."""
    num_cached: int = 0
    """Number of tokens whose KV is in place."""


@dataclass(frozen=True)
class KvLedger:
    """KV memory of a generation group, by the state of the slots to which it is promised."""

    num_bytes: int = 0
    """Total bytes; 0 if unknown."""
    num_bytes_free: int = 0
    """Bytes that are not promised to any slot."""
    num_bytes_leased: int = 0
    """Bytes of slots that are LEASED, COMMITTED or HELD: slots whose KV is being pushed, or that wait to join the
    batch."""
    num_bytes_active: int = 0
    """Bytes of slots of the sequences in the batch."""
    num_bytes_quarantined: int = 0
    """Bytes of slots that were freed while a writer or reader was using them."""

    @property
    def num_bytes_taken(self) -> int:
        """Return the bytes that are promised to slots in any state."""
        return self.num_bytes_leased + self.num_bytes_active + self.num_bytes_quarantined

    @property
    def imbalance(self) -> str:
        """Return a one-line error if free and promised bytes do not add up to `num_bytes`; an empty string if they
        do."""
        free, taken = self.num_bytes_free, self.num_bytes_taken
        if free >= 0 and free + taken == self.num_bytes:
            return ""
        return f"{free} bytes free and {taken} promised are not the {self.num_bytes} of KV"


@dataclass(frozen=True)
class SlotLedger:
    """Snapshot of the number of slots by state, and of their memory. The counts add up at all times (see
    `imbalance`)."""

    num_slots: int
    num_free: int
    num_leased: int
    """Number of slots that are LEASED, COMMITTED or HELD: claimed, and not in the batch yet."""
    num_active: int
    num_quarantined: int
    num_bytes_held: int
    """Committed bytes of KV, in whole pages, in the memory that stores KV between steps (`KvBytes.home`)."""
    num_device_bytes: int
    """Bytes of KV on the device. This number equals `num_bytes_held` if the device stores all KV."""
    kv: KvLedger
    """Bytes promised to slots, by state, whether committed or not, and free bytes as counted by KvMemory
    (`KvBytes.home`)."""

    @classmethod
    def of(cls, slots: Sequence[Slot], memory: KvMemory) -> Self:
        """Return a snapshot of `slots`, which must be all slots of `memory`."""
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
    def imbalance(self) -> str:
        """Return a one-line error if the counts do not add up. It is empty if every slot is counted once, only slots
        that are not free have promised bytes, and the committed bytes do not exceed the promised bytes."""
        states = (self.num_leased, self.num_active, self.num_quarantined)
        promised = (self.kv.num_bytes_leased, self.kv.num_bytes_active, self.kv.num_bytes_quarantined)
        if self.num_free + sum(states) != self.num_slots:
            return f"{self.num_free} free and {sum(states)} taken slots do not add up to {self.num_slots}"
        if self.kv.imbalance:
            return self.kv.imbalance
        if [num_slots > 0 for num_slots in states] != [num_bytes > 0 for num_bytes in promised]:
            return f"{states} slots leased, active, quarantined are promised {promised} bytes"
        if self.num_bytes_held > sum(promised):
            return f"{self.num_bytes_held} bytes are held of {sum(promised)} promised"
        return ""
