"""Life cycle of a slot: its states, the table of legal transitions, the claim on the slot (its use by one lease or
sequence), and the ledger of all slots.

These objects have no lock of their own. `slots.table.SlotTable` owns them and guards them with its lock.

    FREE -> LEASED -> COMMITTED -> ACTIVE -> FREE
              |           |          |
              +-----------+----------+--> QUARANTINED -> FREE     freed while others were using the memory

    FREE -> HELD -> ACTIVE -> FREE      slot of a further choice (n > 1): reserved and activated with the lease's slot
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
    """No lease or sequence uses the slot, and it can be claimed."""
    LEASED = "leased"
    """KV is being pushed to the slot. The lease expires at its deadline unless it is renewed."""
    COMMITTED = "committed"
    """All KV and the first tokens have arrived, and the slot waits to join the batch. The lease still ends at its
    deadline."""
    HELD = "held"
    """The slot is reserved for a further choice of a request whose first choice has leased another slot. If the lease
    ends before the choices join the batch, both slots are freed."""
    ACTIVE = "active"
    """The slot belongs to a sequence in the batch. It has no deadline, and is freed when the sequence ends."""
    QUARANTINED = "quarantined"
    """The slot was freed while others (writers, readers, steps) used its memory. It cannot be claimed until the last
    has ended."""


_LEASED = (SlotState.LEASED, SlotState.COMMITTED, SlotState.HELD)
"""States of a slot that is in use, but whose sequence is not in the batch yet."""


class SlotMove(Enum):
    """Event that moves a slot from one state to another. `TRANSITIONS` lists the legal combinations of a state and an
    event."""

    LEASE = "lease"
    HOLD = "hold"
    OCCUPY = "occupy"
    """A sequence that this group prefills claims a free slot and joins the batch."""
    COMMIT = "commit"
    ACTIVATE = "activate"
    FREE = "free"
    QUARANTINE = "quarantine"
    """The slot is freed while a writer, a reader or a launched step is still using its memory."""
    EMPTY = "empty"
    """The last user of a quarantined slot has ended, and the slot becomes free."""


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
"""Legal transitions: the new state for each state and move. All other moves are bugs."""


@dataclass
class SlotClaim:
    """Claim on a slot: the use of the slot by one lease or sequence, until the slot is freed. Owned by the
    SlotTable."""

    ref: LeaseRef
    memory: Promise
    coverage: Coverage
    """Pieces of the KV of the first `num_cached` tokens that were received so far. Pieces that are still being copied
    to the device are included."""
    num_tokens: int
    """Number of tokens that the sequence had when the claim was made."""
    num_cached: int
    """Number of first tokens, at positions [0, num_cached), whose KV the engine does not compute, because it is pushed
    to the slot or copied from cached blocks. The engine computes the KV of all later tokens."""
    ttl_s: float
    deadline_s: float
    """Time (Clock.now_s()) at which the claim expires. It has an effect only while the slot is LEASED or COMMITTED."""
    firsts: tuple[SampledToken, ...] = ()
    """First token of each choice, set when the lease is committed. Empty if the engine computes these tokens."""
    held: "tuple[Slot, ...]" = ()
    """Slots that are reserved for the further choices of the lease's request (n > 1). Empty after the choices have
    joined the batch. If this claim ends before that, the claims on these slots end, too."""
    uploading: set[tuple[int, TokenRange]] = field(default_factory=set)
    """Parts of received pieces, as (layer, tokens), that are still being copied to the device. Each part counts as a
    writer of the slot."""
    failure: str = ""
    """Error text if the claim ended because a piece could not be copied to the device; otherwise empty."""
    expired: bool = False
    """True if the claim ended because it was not renewed in time."""
    waiters: list[Future[None]] = field(default_factory=list)
    """Futures of commits that wait for KV. When all KV is in the slot's memory, or the claim ends, each future is
    completed and removed from the list."""

    @property
    def is_whole(self) -> bool:
        """Return True if the KV of all of the first `num_cached` tokens has arrived and is in the slot's memory."""
        return self.coverage.complete and not self.uploading

    def wake_all(self) -> None:
        while self.waiters:
            self.waiters.pop().set_result(None)


class Slot:
    """Slot of a generation group: its state, its current claim, and the number of writers and readers of its memory.
    Owned by the SlotTable."""

    def __init__(self, number: SlotId, memory: KvMemory) -> None:
        self.number = number
        self._memory = memory
        self.state = SlotState.FREE
        self.num_inside = 0
        """Number of writers, readers and launched steps that use the slot's memory. Each piece of KV that is being
        copied to the device counts as a writer."""
        self.claim: SlotClaim | None = None
        self.last_expired: Stamp | None = None
        """Stamp of the slot's previous claim if that claim has expired. None if it ended for another reason, or if the
        slot has a new claim."""

    @property
    def is_timed(self) -> bool:
        return self.state in (SlotState.LEASED, SlotState.COMMITTED)

    def begin(self, claim: SlotClaim, move: SlotMove) -> None:
        """Begin a claim on a free slot. `move` determines the new state: LEASED, HELD or ACTIVE."""
        self.move(move)
        self.claim = claim
        self.last_expired = None

    def end(self, *, expired: bool = False) -> None:
        """End the current claim. If slots are still reserved for further choices of its request (`SlotClaim.held`), end
        the claims on these slots, too. Operations with the claim's stamp fail from now on. The memory is freed when no
        writer or reader uses it any more. `expired`: True if the claim ends because its deadline has passed."""
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
        """Decrement the number of users of the memory. Return True if the slot was quarantined and has now become
        free."""
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
        """Change the slot's state as `TRANSITIONS` defines for this move. The class Claims calls this method directly
        only for COMMIT and ACTIVATE; other methods of the slot make the other moves."""
        target = TRANSITIONS.get((self.state, move))
        assert target is not None, f"slot {self.number} cannot {move.value} while {self.state.value}"
        self.state = target


@dataclass(frozen=True)
class BatchSlot:
    """Slot of a sequence that joins the batch. The SlotTable owns the slot's memory. The sequence uses it until
    `SlotTable.release` is called."""

    ref: LeaseRef
    row: RowKv
    first: SampledToken | None
    """First token of the choice, if the prompt's KV was pushed by a prefill rank; None if this group's engine computes
    the token."""
    num_cached: int = 0
    """Number of the sequence's first tokens whose KV is already in the slot."""


@dataclass(frozen=True)
class KvLedger:
    """Numbers of bytes of a generation group's KV memory: in total, free, and reserved for (promised to) slots in each
    state."""

    num_bytes: int = 0
    """Total number of bytes of KV memory; 0 if unknown."""
    num_bytes_free: int = 0
    """Number of bytes that are not promised to (reserved for) any slot."""
    num_bytes_leased: int = 0
    """Number of bytes reserved for slots that are LEASED, COMMITTED or HELD. KV is being pushed to these slots, or
    their sequences wait to join the batch."""
    num_bytes_active: int = 0
    """Number of bytes reserved for the slots of the sequences in the batch."""
    num_bytes_quarantined: int = 0
    """Number of bytes reserved for slots that were freed while others were using their memory."""

    @property
    def num_bytes_taken(self) -> int:
        """Return the number of bytes that are reserved for slots in any state."""
        return self.num_bytes_leased + self.num_bytes_active + self.num_bytes_quarantined

    @property
    def imbalance(self) -> str:
        """Return a one-line error if free and reserved bytes do not add up to `num_bytes`, or if the number of free
        bytes is negative. Return an empty string otherwise."""
        free, taken = self.num_bytes_free, self.num_bytes_taken
        if free >= 0 and free + taken == self.num_bytes:
            return ""
        return f"{free} bytes free and {taken} promised are not the {self.num_bytes} of KV"


@dataclass(frozen=True)
class SlotLedger:
    """Snapshot of the numbers of slots in each state, and of the memory of the slots. The numbers always add up, which
    `imbalance` checks."""

    num_slots: int
    num_free: int
    num_leased: int
    """Number of slots that are LEASED, COMMITTED or HELD: slots that are in use, but whose sequences are not in the
    batch yet."""
    num_active: int
    num_quarantined: int
    num_bytes_held: int
    """Number of committed bytes of KV, in whole pages, in the memory that stores KV between steps (`KvBytes.home`)."""
    num_device_bytes: int
    """Number of committed bytes of KV on the device. It equals `num_bytes_held` if the device stores all KV."""
    kv: KvLedger
    """Bytes that are promised to (reserved for) slots, by state, and bytes that are free. Promised bytes may not be
    committed yet. All numbers refer to the memory that stores KV between steps (`KvBytes.home`)."""

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
        """Return a one-line error if the counts do not add up; an empty string if they do. Each slot must be counted in
        exactly one state. Memory may be promised to (reserved for) a slot only if the slot is not free. Committed bytes
        must not exceed promised bytes."""
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
