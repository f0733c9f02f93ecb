"""KvSink that stores KV in plain bytearrays. It is the reference implementation of the port, with methods by which
tests inspect its state.

Everything runs on one asyncio loop. It is not a mock: it follows every rule of baton.transport.kv_sink.
"""

import asyncio
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from baton.errors import (
    IncompletePushError,
    InvalidArgumentError,
    LeaseError,
    LeaseExpiredError,
    ResourceExhaustedError,
    StaleStampError,
)
from baton.process.clock import Clock
from baton.transport.coverage import Coverage
from baton.transport.kv_sink import ReserveSpec
from baton.types import KvLayout, Lease, LeaseRef, SampledToken, SlotId, Stamp, TokenRange


@dataclass
class _Claim:
    """Use of a slot from its lease to its release."""

    lease: Lease
    memory: list[bytearray]
    """Memory of each layer, with the slot's capacity."""
    coverage: Coverage
    ttl_s: float
    deadline_s: float
    firsts: tuple[SampledToken, ...] = ()
    held: list[SlotId] = field(default_factory=list)
    """Slots of further choices. They are claimed and released together with this slot."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the last byte has arrived and when the claim ends."""


@dataclass
class _Slot:
    claim: _Claim | None = None
    last_expired: Stamp | None = None
    num_writers: int = 0


class MemorySink:
    """Sink with slots of `capacity_tokens` tokens each. Only the loop that calls it changes its state."""

    def __init__(self, layout: KvLayout, clock: Clock, *, num_slots: int = 1, capacity_tokens: int = 64) -> None:
        self._layout = layout
        self._clock = clock
        self._capacity_tokens = capacity_tokens
        self._slots = [_Slot() for _ in range(num_slots)]
        self._num_stamps = 0
        self._watchers: list[tuple[SlotId, int, asyncio.Future[None]]] = []

    @property
    def layout(self) -> KvLayout:
        return self._layout

    def reserve(self, request: ReserveSpec) -> Lease:
        if request.capacity_tokens > self._capacity_tokens:
            raise InvalidArgumentError(
                f"capacity_tokens = {request.capacity_tokens} is out of range: slots hold {self._capacity_tokens}"
            )
        if not 1 <= request.num_choices <= len(self._slots):
            raise InvalidArgumentError(f"n = {request.num_choices} is out of range: there are {len(self._slots)} slots")
        self._expire()
        free = [number for number, slot in enumerate(self._slots) if slot.claim is None and not slot.num_writers]
        if len(free) < request.num_choices:
            raise ResourceExhaustedError(f"{len(free)} slots are free: try again later")
        for number in free[: request.num_choices]:
            self._slots[number].claim = self._claim(SlotId(number), request)
            self._slots[number].last_expired = None
        leader = self._slots[free[0]].claim
        assert leader is not None
        leader.held = [SlotId(number) for number in free[1 : request.num_choices]]
        return leader.lease

    def renew(self, ref: LeaseRef, ttl_s: float) -> None:
        claim = self._find(ref)
        claim.ttl_s = ttl_s
        self._touch(claim)

    @contextmanager
    def open_push(self, ref: LeaseRef) -> Iterator["MemoryWriter"]:
        self._touch(self._find(ref))
        slot = self._slots[ref.slot]
        slot.num_writers += 1
        self._notify()
        try:
            yield MemoryWriter(self, ref)
        finally:
            slot.num_writers -= 1
            self._notify()

    async def commit(self, ref: LeaseRef, firsts: Sequence[SampledToken], wait_s: float = math.inf) -> int:
        claim = self._find(ref)
        give_up_s = self._clock.now_s() + min(wait_s, claim.ttl_s)
        while not claim.coverage.complete:
            left_s = min(give_up_s, claim.deadline_s) - self._clock.now_s()
            if left_s <= 0:
                raise self._incomplete(claim)
            self._find(ref)
            await _wait(claim.changed, left_s)
        claim = self._find(ref)
        if claim.firsts and [each.token_id for each in claim.firsts] != [each.token_id for each in firsts]:
            raise LeaseError(f"slot {ref.slot} is committed with other tokens: reserve another slot")
        if len(firsts) != 1 + len(claim.held):
            raise LeaseError(f"{len(firsts)} first tokens for {1 + len(claim.held)} choices")
        claim.firsts = tuple(firsts)
        self._touch(claim)
        return claim.lease.num_tokens * self._layout.token_bytes

    def abort(self, ref: LeaseRef) -> None:
        if ref.slot < len(self._slots):
            claim = self._slots[ref.slot].claim
            if claim is not None and claim.lease.ref == ref:
                self._end(ref)

    # For inspection by tests.

    def read(self, ref: LeaseRef, layer: int, tokens: TokenRange) -> bytes:
        """Return bytes of the slot's memory, including bytes that were not written."""
        return bytes(self._find(ref).memory[layer][self._span(tokens)])

    def first(self, ref: LeaseRef) -> SampledToken | None:
        """Return the token with which the slot was committed."""
        return next(iter(self._find(ref).firsts), None)

    def num_writers(self, slot: SlotId) -> int:
        return self._slots[slot].num_writers

    async def writers_become(self, slot: SlotId, count: int, timeout_s: float = 60.0) -> None:
        """Wait until the slot has `count` writers. Raises TimeoutError after `timeout_s` seconds."""
        reached = asyncio.get_running_loop().create_future()
        self._watchers.append((slot, count, reached))
        self._notify()
        await asyncio.wait_for(reached, timeout_s)

    def _claim(self, slot: SlotId, request: ReserveSpec) -> _Claim:
        self._num_stamps += 1
        ref = LeaseRef(slot, Stamp(self._num_stamps))
        lease = Lease(ref, request.request_id, request.attempt, request.num_tokens, "127.0.0.1:0", request.ttl_s)
        return _Claim(
            lease=lease,
            memory=[
                bytearray(request.capacity_tokens * self._layout.row_bytes) for _ in range(self._layout.num_layers)
            ],
            coverage=Coverage(self._layout.num_layers, request.num_tokens),
            ttl_s=request.ttl_s,
            deadline_s=self._clock.now_s() + request.ttl_s,
        )

    def _write(self, ref: LeaseRef, layer: int, tokens: TokenRange, data: memoryview) -> bool:
        claim = self._find(ref)
        is_new = claim.coverage.add(layer, tokens)
        if is_new:
            claim.memory[layer][self._span(tokens)] = data
        if claim.coverage.complete:
            claim.changed.set()
        self._touch(claim)
        return is_new

    def _span(self, tokens: TokenRange) -> slice:
        return slice(tokens.start * self._layout.row_bytes, tokens.end * self._layout.row_bytes)

    def _find(self, ref: LeaseRef) -> _Claim:
        self._expire()
        slot = self._slots[ref.slot] if ref.slot < len(self._slots) else _Slot()
        if slot.claim is not None and slot.claim.lease.ref == ref:
            return slot.claim
        if slot.last_expired == ref.stamp:
            raise LeaseExpiredError(f"the lease of slot {ref.slot} was not renewed in time: reserve again")
        raise StaleStampError(f"stamp {ref.stamp} of slot {ref.slot} is stale: the slot was freed or leased again")

    def _expire(self) -> None:
        held = {number for slot in self._slots if slot.claim is not None for number in slot.claim.held}
        for number, slot in enumerate(self._slots):
            if slot.claim is not None and number not in held and slot.claim.deadline_s <= self._clock.now_s():
                slot.last_expired = slot.claim.lease.ref.stamp
                self._end(slot.claim.lease.ref)

    def _end(self, ref: LeaseRef) -> None:
        slot = self._slots[ref.slot]
        claim, slot.claim = slot.claim, None
        if claim is not None:
            claim.changed.set()
            for held in claim.held:
                self._slots[held].claim = None

    def _touch(self, claim: _Claim) -> None:
        claim.deadline_s = self._clock.now_s() + claim.ttl_s

    def _incomplete(self, claim: _Claim) -> IncompletePushError:
        missing = claim.coverage.first_missing()
        assert missing is not None
        layer, tokens = missing
        return IncompletePushError(
            f"slot {claim.lease.ref.slot}: layer {layer}, tokens [{tokens.start}, {tokens.end}) have not arrived: "
            "push them and commit again"
        )

    def _notify(self) -> None:
        for slot, count, reached in self._watchers:
            if self._slots[slot].num_writers == count and not reached.done():
                reached.set_result(None)


class MemoryWriter:
    """Writer of KV for one lease."""

    def __init__(self, sink: MemorySink, ref: LeaseRef) -> None:
        self._sink = sink
        self._ref = ref

    async def write(self, layer: int, tokens: TokenRange, data: memoryview) -> bool:
        return self._sink._write(self._ref, layer, tokens, data)

    async def settle(self) -> None:
        """Return at once: all writes are synchronous."""


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return  # the caller checks the clock again
