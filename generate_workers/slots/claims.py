"""Claims on the slots of a group. A claim is the use of a slot by one lease or sequence. The module knows which slots
are free, and the claim and deadline of every other slot.

`SlotTable` calls the module while it holds the table's lock; the module has no lock of its own. A claim is looked up by
its stamp, a number that is never reused, so that an earlier holder of a slot cannot use a later claim.
"""

import math
from collections.abc import Sequence

from baton.errors import InvalidArgumentError, LeaseError, LeaseExpiredError, ResourceExhaustedError, StaleStampError
from baton.process.clock import Clock
from baton.transport.coverage import Coverage
from baton.transport.kv_sink import ReserveSpec
from baton.types import LeaseRef, SampledToken, SlotId, Stamp
from generate_workers.residency.port import KvBytes
from generate_workers.slots.kv_memory import KvMemory
from generate_workers.slots.leases import BatchSlot, Slot, SlotClaim, SlotMove, SlotState


class Claims:
    """All slots of one group, and the claims on them. Not thread-safe: the SlotTable's lock guards it."""

    def __init__(self, memory: KvMemory, clock: Clock) -> None:
        self.slots = tuple(Slot(SlotId(number), memory) for number in range(memory.shape.num_slots))
        self.changed = False
        """True if a claim has begun, was committed, was renewed or has ended since the SlotTable last reported
        changes."""
        self.num_owed, self.owed = 0, KvBytes()
        """Number of slots, and bytes of memory, that are set aside for sequences that wait to resume or to grow. New
        leases must not use them."""
        self._memory = memory
        self._clock = clock
        self._next_stamp = max(clock.unix_ns(), 1)  # a restarted process must not reuse stamps of its last incarnation

    def room(self, request: ReserveSpec) -> list[Slot]:
        """Find a free slot for each choice of the request, and return the slots without claiming them. Raises
        InvalidArgumentError for a field out of range, and ResourceExhaustedError if too few slots or too little memory
        is free."""
        num_tokens, capacity, num_choices = request.num_tokens, request.capacity_tokens, request.num_choices
        _check_spec(request, len(self.slots), self._memory.shape.max_slot_tokens)
        self._memory.check(num_tokens, capacity, num_choices)
        slots = self._free_slots(num_choices + self.num_owed)[:num_choices]
        if not slots:
            few = f"fewer than {num_choices} of {len(self.slots)} slots are free"
            raise ResourceExhaustedError(f"{few}{self._kept()}: try again, or add num_slots")
        if shortage := self._memory.shortage(self._memory.need(num_tokens, capacity, num_choices), self.owed):
            raise ResourceExhaustedError(f"{shortage}{self._kept()}: try again, or raise it")
        return slots

    def reserve(self, request: ReserveSpec, num_present_tokens: int) -> SlotClaim:
        """Lease a free slot for the request's first choice, and reserve another free slot for each further choice.
        `num_present_tokens`: if this group prefills the prompt, the number of first tokens whose KV is copied from
        cached blocks; otherwise ignored. Raises InvalidArgumentError for a field out of range, and
        ResourceExhaustedError if too few slots or too little memory is free."""
        slots, num_tokens = self.room(request), request.num_tokens
        num_cached = num_present_tokens if request.prefills_locally else num_tokens
        claims = self._make(slots, num_tokens, request.capacity_tokens, num_cached=num_cached, ttl_s=request.ttl_s)
        claims[0].held = tuple(slots[1:])
        for slot, each in zip(slots, claims, strict=True):
            slot.begin(each, SlotMove.LEASE if each is claims[0] else SlotMove.HOLD)
        return claims[0]

    def occupy(self, num_tokens: int, capacity_tokens: int, num_choices: int) -> list[BatchSlot] | None:
        """Claim a slot for each of `num_choices` sequences that join the batch now, and return the slots. Return None
        if too few slots or too little memory is free. `num_tokens`, `capacity_tokens`: current and maximum number of
        tokens of each sequence."""
        slots = self._free_slots(num_choices)
        if not slots or self._memory.shortage(self._memory.need(num_tokens, capacity_tokens, num_choices)):
            return None
        claims = self._make(slots, num_tokens, capacity_tokens)
        for slot, claim in zip(slots, claims, strict=True):
            slot.begin(claim, SlotMove.OCCUPY)
        return [BatchSlot(claim.ref, claim.memory.row, None) for claim in claims]

    def activate(self, ref: LeaseRef) -> list[BatchSlot] | None:
        """Activate a committed lease: its sequences join the batch. Return a `BatchSlot` for each choice. Only the
        first choice's slot has KV. Return None if the lease is not committed yet. Raises LeaseError if the slot already
        belongs to a sequence in the batch or to a further choice of a lease, and StaleStampError or LeaseExpiredError
        if the lease has ended."""
        slot = self.find(ref)
        if slot is not None and slot.state is not SlotState.COMMITTED:
            if slot.state is SlotState.LEASED:
                return None
            raise LeaseError(f"slot {ref.slot} is another row's: reserve one")
        lease = self.present(ref)
        slots, lease.held = (self.slots[ref.slot], *lease.held), ()
        batch_slots = []
        for slot, first in zip(slots, lease.firsts or [None] * len(slots), strict=True):
            slot.move(SlotMove.ACTIVATE)
            assert slot.claim is not None
            num_cached = lease.num_cached if slot is slots[0] else 0
            batch_slots.append(BatchSlot(slot.claim.ref, slot.claim.memory.row, first, num_cached))
        return batch_slots

    def next_deadline_s(self) -> float:
        """Return the earliest deadline of all leases (Clock.now_s()); infinity if no lease exists."""
        return min((slot.claim.deadline_s for slot in self.slots if slot.claim and slot.is_timed), default=math.inf)

    def find(self, ref: LeaseRef) -> Slot | None:
        """Return the slot whose current claim has the stamp of `ref`; None if the claim has ended."""
        if not 0 <= ref.slot < len(self.slots):
            return None
        slot = self.slots[ref.slot]
        holds = slot.claim is not None and slot.claim.ref.stamp == ref.stamp
        return slot if holds and slot.state is not SlotState.QUARANTINED else None

    def active(self, ref: LeaseRef) -> Slot:
        """Return the slot of a sequence in the batch. The sequence may have ended, as long as it has not released its
        slot."""
        slot = self.find(ref)
        assert slot is not None and slot.state is SlotState.ACTIVE, f"{ref} is not an active row"
        return slot

    def present(self, ref: LeaseRef) -> SlotClaim:
        """Return the current claim with the stamp of `ref`. Raises LeaseExpiredError if this claim has expired, and
        StaleStampError if it has ended for another reason."""
        self.expire()
        slot = self.find(ref)
        if slot is not None and slot.claim is not None:
            return slot.claim
        if 0 <= ref.slot < len(self.slots) and self.slots[ref.slot].last_expired == ref.stamp:
            raise LeaseExpiredError(f"lease of slot {ref.slot} was not renewed in time: reserve a slot again")
        raise StaleStampError(f"stamp {ref.stamp} of slot {ref.slot} is stale: the slot was freed or leased again")

    def renew(self, ref: LeaseRef, ttl_s: float) -> None:
        """Set the lease's time to live to `ttl_s` seconds from now. Raises InvalidArgumentError if `ttl_s` is out of
        range, and StaleStampError or LeaseExpiredError if the lease has ended."""
        _check_ttl(ttl_s)
        claim = self.present(ref)
        claim.ttl_s = ttl_s
        self.touch(claim)
        self.changed = True

    def touch(self, claim: SlotClaim) -> None:
        """Set a claim's deadline to the present time plus the claim's time to live."""
        claim.deadline_s = self._clock.now_s() + claim.ttl_s

    def expire(self) -> None:
        """End every lease whose deadline has passed."""
        now_s = self._clock.now_s()
        for slot in self.slots:
            if slot.claim and slot.is_timed and slot.claim.deadline_s <= now_s:
                slot.end(expired=True)
                self.changed = True

    def complete(self, claim: SlotClaim, firsts: tuple[SampledToken, ...]) -> None:
        """Commit a lease whose KV has completely arrived. `firsts`: first token of each choice. A repeated call must
        have the same first tokens. Raises LeaseError for other first tokens, or if this group's engine prefills the
        prompt."""
        slot = self.slots[claim.ref.slot]
        if claim.num_cached < claim.num_tokens:
            raise LeaseError(f"slot {slot.number} is prefilled by its own stream: push and commit nothing there")
        if slot.state is SlotState.LEASED:
            num_choices = 1 + len(claim.held)
            if len(firsts) != num_choices:
                raise LeaseError(f"{len(firsts)} first tokens for the {num_choices} choices of slot {slot.number}")
            claim.firsts = firsts
            self._commit(claim)
        elif [each.token_id for each in claim.firsts] != [each.token_id for each in firsts]:
            raise LeaseError(f"slot {slot.number} is committed with another token: reserve a slot of your own")

    def complete_locally(self, ref: LeaseRef) -> None:
        """Commit a lease whose prompt this group's engine prefills. All cached blocks of the prompt must already be in
        the slot's memory. The engine computes the KV of all later tokens."""
        claim = self.present(ref)
        assert claim.num_cached < claim.num_tokens and claim.is_whole
        self._commit(claim)

    def _commit(self, claim: SlotClaim) -> None:
        self.slots[claim.ref.slot].move(SlotMove.COMMIT)
        self.touch(claim)
        self.changed = True

    def _kept(self) -> str:
        is_owing = self.num_owed or self.owed != KvBytes()
        return ", what rows wait for that gave way or must grow set aside" if is_owing else ""

    def _free_slots(self, count: int) -> list[Slot]:
        """Return `count` free slots; an empty list if fewer are free."""
        self.expire()
        free = [slot for slot in self.slots if slot.state is SlotState.FREE]
        return free[:count] if len(free) >= count else []

    def _make(
        self, slots: Sequence[Slot], num_tokens: int, capacity: int, *, num_cached: int = 0, ttl_s: float = math.inf
    ) -> list[SlotClaim]:
        promises = self._memory.promise([slot.number for slot in slots], num_tokens, capacity)
        stamps = range(self._next_stamp, self._next_stamp + len(slots))
        self._next_stamp = stamps.stop
        self.changed = True
        return [
            SlotClaim(
                ref=LeaseRef(slot.number, Stamp(stamp)),
                memory=memory,
                coverage=Coverage(self._memory.shape.layout.num_layers, num_cached),
                num_tokens=num_tokens,
                num_cached=num_cached,
                ttl_s=ttl_s,
                deadline_s=self._clock.now_s() + ttl_s,
            )
            for slot, stamp, memory in zip(slots, stamps, promises, strict=True)
        ]


def _check_spec(request: ReserveSpec, num_slots: int, max_slot_tokens: int) -> None:
    num_tokens, capacity, num_choices = request.num_tokens, request.capacity_tokens, request.num_choices
    _require(num_tokens >= 1, "num_tokens", num_tokens, "use at least 1")
    _require(num_tokens <= capacity, "num_tokens", num_tokens, f"capacity_tokens is {capacity}")
    most = f"a slot of this group holds at most {max_slot_tokens}"
    _require(capacity <= max_slot_tokens, "capacity_tokens", capacity, most)
    _check_ttl(request.ttl_s)
    _require(1 <= num_choices <= num_slots, "n", num_choices, f"this group has {num_slots} slots")


def _check_ttl(ttl_s: float) -> None:
    _require(0 < ttl_s < math.inf, "ttl_s", ttl_s, "use a time above 0 seconds")


def _require(holds: bool, name: str, value: object, remedy: str) -> None:
    if not holds:
        raise InvalidArgumentError(f"{name} = {value!r} is out of range: {remedy}")
