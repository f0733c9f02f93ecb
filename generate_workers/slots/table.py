"""The slots of a generation group: timed, fenced claims on rows of the batch, and the memory they hold.

`transport.kv_receiver` leases, pushes and commits through this table, a transport.kv_sink.KvSink, on the process's
asyncio loop; `engine.core` occupies, activates, expires and releases on its thread; `prefixes` copy blocks in and
answers out on theirs, and release what they have copied. One lock guards the bookkeeping (`claims`); it is held for
that and, where KV is written at home, for one piece's copy, never while waiting. Pieces for a device with memory of its
own go there by `landing`, without the lock.
"""

import asyncio
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

from baton.clock import Clock
from baton.errors import IncompletePushError, TransferError
from baton.ids import SlotId
from baton.types import Lease, LeaseRef, SampledToken, TokenRange
from generate_workers.residency.port import KvBytes, SharesPrefixes
from generate_workers.slots.access import FrameWriter, HomeWriter, SlotReader, SlotWriter
from generate_workers.slots.claims import Claims
from generate_workers.slots.landing import FramedPiece, Landing
from generate_workers.slots.leases import Claim, Seat, SlotLedger, SlotState
from generate_workers.slots.memory import KvMemory
from transport.coverage import Added
from transport.kv_sink import ReserveSpec


class SlotTable:
    """All slots of one generation group. Thread-safe."""

    def __init__(self, memory: KvMemory, clock: Clock, *, endpoint: str) -> None:
        """`endpoint` is the host:port that leases name; the table owns `memory` from now on. Raises ConfigError when
        the device's staging frames are too small for the model."""
        self.max_slot_tokens = memory.shape.max_slot_tokens
        self.on_change: Callable[[], None] = _ignore
        """Called after a claim begins, is committed, is renewed or ends, on the changing thread and without the lock.
        Set once, by the engine, before the table is used. Must neither block nor raise."""
        self.on_abandon: Callable[[LeaseRef], None] = _ignore
        """Called by `abort`, without the lock, when the lease has become rows, which are to leave, or has ended. Set
        once, by the engine. Must neither block nor raise."""
        self.memory = memory
        """KV memory of all slots; changed only under the table's lock."""
        self.layout = memory.shape.layout
        """Layout in which the slots store KV."""
        self.num_slots = memory.shape.num_slots
        self._endpoint = endpoint
        self._clock = clock
        self._lock = threading.Lock()
        self._claims = Claims(memory, clock)
        self._slots = self._claims.slots
        frames = memory.residency.frames
        self._landing = None if frames is None else Landing(frames, self.layout.row_bytes, self._note_landed)
        """Way of pieces to a device with memory of its own; None: pieces are written in place."""

    # On the loop: the KvSink.

    def reserve(self, request: ReserveSpec, num_present_tokens: int = 0) -> Lease:
        """Lease a free slot, with memory for its tokens and some growth, and hold one for each further choice. The
        caller writes the first `num_present_tokens`, then calls `complete_locally` if no rank pushes. Raises
        ResourceExhaustedError when slots or memory are short, InvalidArgumentError for a field out of range."""
        with self._changing():
            claim = self._claims.reserve(request, num_present_tokens)
        owner = request.request_id, request.attempt
        return Lease(claim.ref, *owner, request.num_tokens, self._endpoint, request.ttl_s, num_present_tokens)

    def check_room(self, request: ReserveSpec) -> None:
        """Raise the error that `reserve` would raise now, if any."""
        with self._changing():
            self._claims.room(request)

    def begin_with(self, ref: LeaseRef, names: Sequence[str], block_tokens: int) -> int:
        """Begin a new lease, into which nothing was written, with those leading blocks that rows share; return their
        tokens. The caller writes the others. Raises StaleStampError or LeaseExpiredError when the lease has ended."""
        with self._changing():
            claim = self._claims.present(ref)
            row = claim.memory.row
            num_tokens = row.begin_with(names, block_tokens) if isinstance(row, SharesPrefixes) else 0
            for layer in range(self.layout.num_layers if num_tokens else 0):
                for block in TokenRange(0, num_tokens).split(block_tokens):
                    claim.coverage.add(layer, block)
            return num_tokens

    def keep_prefix(self, ref: LeaseRef, names: Sequence[str], block_tokens: int) -> None:
        """Leave a slot's first blocks, which are written, to rows that begin alike, if the policy shares any. Raises
        StaleStampError or LeaseExpiredError when the lease has ended."""
        with self._changing():
            row = self._claims.present(ref).memory.row
            if isinstance(row, SharesPrefixes):
                row.keep(names, block_tokens)

    def renew(self, ref: LeaseRef, ttl_s: float) -> None:
        """Let the lease live `ttl_s` seconds from now; raise StaleStampError or LeaseExpiredError when it has ended."""
        with self._changing():
            self._claims.renew(ref, ttl_s)

    @contextmanager
    def open_push(self, ref: LeaseRef) -> Iterator[SlotWriter]:
        """Renew the lease and count a writer until exit: the slot is not claimed anew before its last writer leaves and
        what it took over has landed. Exiting does not wait for that: see SlotWriter."""
        with self._changing():
            claim = self._claims.present(ref)
            self._claims.touch(claim)
            self._slots[ref.slot].num_inside += 1
        try:
            yield self._writer(claim)
        finally:
            self._leave(claim)

    async def commit(self, ref: LeaseRef, firsts: Sequence[SampledToken], wait_s: float = math.inf) -> int:
        """Complete the lease with each choice's first token, once every byte is in; return the bytes of its tokens.
        Waits for missing bytes at most `wait_s` seconds and at most until the lease expires, then raises
        IncompletePushError that names the first missing range. Idempotent for the same tokens; others raise LeaseError.
        A lease that was aborted meanwhile raises StaleStampError, one whose piece could not be copied TransferError. A
        cancelled wait changes nothing."""
        with self._changing():
            claim = self._claims.present(ref)
        give_up_s = self._clock.now_s() + wait_s
        while (missing := self._missing(claim)) is not None:
            left_s = min(claim.deadline_s, give_up_s) - self._clock.now_s()
            if left_s <= 0:
                layer, tokens = missing
                arrived, absent = "are on their way to the device: commit again", "have not arrived: push them"
                raise IncompletePushError(
                    f"commit of slot {ref.slot}: layer {layer}, tokens [{tokens.start}, {tokens.end}) "
                    f"{arrived if claim.coverage.complete else f'{absent} and commit again'}"
                )
            await self._wait(claim, left_s)
        with self._changing():
            self._claims.complete(self._claims.present(ref), tuple(firsts))
        return claim.num_tokens * self.layout.token_bytes

    def complete_locally(self, ref: LeaseRef) -> None:
        """Commit a lease whose copied blocks are all in; its row computes the rest. Any thread. Raises StaleStampError
        or LeaseExpiredError when the lease has ended."""
        with self._changing():
            self._claims.complete_locally(ref)

    def abort(self, ref: LeaseRef) -> None:
        """End the lease: the slot is free once its last writer has left. If the lease has become rows, report it to
        `on_abandon` instead. Idempotent; a stale stamp changes no slot."""
        with self._changing():
            slot = self._claims.find(ref)
            if slot is not None and slot.state is not SlotState.ACTIVE:
                slot.end()
                self._claims.changed = True
                return
        self.on_abandon(ref)

    # On the engine's thread.

    def occupy(self, num_tokens: int, capacity_tokens: int, num_choices: int = 1) -> list[Seat] | None:
        """Claim slots for rows of `num_tokens` tokens, all computed here; None when too few slots or too little memory
        is free. Raises ResourceExhaustedError when the device has less memory than configured."""
        with self._changing():
            return self._claims.occupy(num_tokens, capacity_tokens, num_choices)

    def extend(self, slot: SlotId, num_tokens: int) -> KvBytes | None:
        """Promise an active row memory for `num_tokens` tokens; return the bytes that it needs beyond its promise when
        there is no room now, else None."""
        claim = self._slots[slot].claim
        assert claim is not None
        if num_tokens <= claim.memory.num_tokens:
            return None
        with self._lock:
            if self.memory.extend(claim.memory, num_tokens):
                return None
        return self.memory.residency.bytes_for(num_tokens) - claim.memory.num_bytes

    def owe(self, num_slots: int, num_bytes: KvBytes) -> None:
        """Reserve slots and memory for rows that wait to resume or to grow: new leases leave that much free."""
        with self._lock:
            self._claims.num_owed, self._claims.owed = num_slots, num_bytes

    def activate(self, ref: LeaseRef) -> list[Seat] | None:
        """Turn a committed lease into rows, one per choice; only the first has the KV. None before the commit. Raises
        LeaseError when it has its rows already, StaleStampError or LeaseExpiredError when it has ended."""
        with self._changing():
            return self._claims.activate(ref)

    def open_read(self, ref: LeaseRef) -> SlotReader:
        """Count a reader of an active slot in, until the reader closes. Its row must write nothing more."""
        with self._changing():
            slot = self._claims.active(ref)
            assert slot.claim is not None
            slot.num_inside += 1
            return SlotReader(slot.claim, self.leased_tokens, self._leave)

    def release(self, ref: LeaseRef) -> None:
        """Free the slot of a row that runs or has ended; the row must not touch its memory again. Any thread."""
        with self._changing():
            self._claims.active(ref).end()
            self._claims.changed = True

    def leased_tokens(self, ref: LeaseRef) -> int:
        """Return how many tokens this lease is for; raise StaleStampError or LeaseExpiredError when it has ended."""
        with self._changing():
            return self._claims.present(ref).num_tokens

    def expire(self) -> None:
        """End every lease whose deadline has passed, including committed leases that were not activated."""
        with self._changing():
            self._claims.expire()

    def next_deadline_s(self) -> float:
        """Return when the next lease expires as things stand (Clock.now_s()); infinity for never."""
        with self._lock:
            return self._claims.next_deadline_s()

    def ledger(self) -> SlotLedger:
        """Return a snapshot of what is held now. Any thread."""
        with self._lock:
            return SlotLedger.of(self._slots, self.memory)

    def rest(self) -> None:
        """Wait for pieces on their way to the device, and end the thread that brings them. Idempotent."""
        if self._landing is not None:
            self._landing.rest()

    def _writer(self, claim: Claim) -> SlotWriter:
        if self._landing is None:
            return HomeWriter(claim, self._write)
        return FrameWriter(claim, self._landing, self._expect)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock; after releasing it call `on_change` if anything changed, even if the block raised."""
        changed = False
        try:
            with self._lock:
                try:
                    yield
                finally:
                    changed, self._claims.changed = self._claims.changed, False
        finally:
            if changed:
                self.on_change()

    def _write(self, claim: Claim, layer: int, tokens: TokenRange, data: memoryview) -> bool:
        with self._changing():
            self._claims.present(claim.ref)
            assert data.nbytes == len(tokens) * self.layout.row_bytes
            is_new = claim.coverage.add(layer, tokens) is Added.NEW
            if is_new:
                try:
                    claim.memory.row.write(layer, tokens, data).result()
                except BaseException:  # marked present but not written: this claim must never be committed
                    self._slots[claim.ref.slot].end()
                    self._claims.changed = True
                    raise
            self._claims.touch(claim)
            if claim.is_whole:
                claim.wake_all()
            return is_new

    def _expect(self, claim: Claim, layer: int, tokens: TokenRange, parts: Sequence[TokenRange]) -> bool:
        """Note a piece as present, and each part of it as a writer inside, until `_note_landed` is called for it."""
        with self._changing():
            _check_failure(claim)
            self._claims.present(claim.ref)
            is_new = claim.coverage.add(layer, tokens) is Added.NEW
            if is_new:
                claim.landing.update((layer, part) for part in parts)
                self._slots[claim.ref.slot].num_inside += len(parts)
            self._claims.touch(claim)
            return is_new

    def _note_landed(self, piece: FramedPiece, failure: str) -> None:
        """Count a part as in its place. End the claim of one that could not be copied: its piece is noted as present,
        so the claim must never be committed."""
        claim = piece.claim
        with self._changing():
            claim.landing.remove((piece.layer, piece.tokens))
            self._claims.expire()
            slot = self._claims.find(claim.ref)
            if slot is not None and failure:
                claim.failure = failure
                slot.end()
                self._claims.changed = True
            elif slot is not None:
                self._claims.touch(claim)
                if claim.is_whole:
                    claim.wake_all()
            self._claims.changed |= self._slots[claim.ref.slot].leave()

    def _leave(self, claim: Claim) -> None:
        with self._changing():
            self._claims.changed |= self._slots[claim.ref.slot].leave()

    def _missing(self, claim: Claim) -> tuple[int, TokenRange] | None:
        with self._changing():
            self._claims.expire()
            _check_failure(claim)
            if not claim.expired:
                self._claims.present(claim.ref)
            return claim.coverage.first_missing() or min(claim.landing, default=None)

    async def _wait(self, claim: Claim, timeout_s: float) -> None:
        """Wait until every byte is in, the claim has ended, or the time is up."""
        waiter = Future[None]()
        with self._lock:
            if claim.is_whole or self._claims.find(claim.ref) is None:
                return
            claim.waiters.append(waiter)
        try:  # `asyncio.wait` cancels no future, so that waking a waiter cannot fail
            await asyncio.wait([asyncio.wrap_future(waiter)], timeout=None if timeout_s == math.inf else timeout_s)
        finally:
            with self._lock:
                if not waiter.done():
                    claim.waiters.remove(waiter)


def _check_failure(claim: Claim) -> None:
    """Raise TransferError for a claim that ended because a piece could not be copied."""
    if claim.failure:
        raise TransferError(claim.failure)


def _ignore(*_what: object) -> None:
    """Do nothing: no listener is set yet."""
