"""Slots of a generation group. A slot is memory for one sequence of the batch. Each use of a slot by a sequence (claim)
has a deadline and a stamp. Stamps are never reused, so a call with the stamp of an earlier claim is rejected.

Callers by thread:

- `baton.transport.kv_receiver` leases slots, pushes KV and commits leases on the process's asyncio loop. It uses the
  table as a baton.transport.kv_sink.KvSink.
- `engine` calls `occupy`, `activate`, `expire`, `enter`, `leave` and `release` on the engine's thread.
- `prefixes` copies cached blocks into slots, and copies answers out of slots, on its own threads. It releases a slot
  after it has copied the slot's answer.

One lock guards the bookkeeping (`claims`). If KV is written in place, the lock is also held while one piece is copied.
It is never held while waiting. `device_upload` copies pieces to a device with its own memory, without the lock.
"""

import asyncio
import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

from baton.errors import IncompletePushError, TransferError
from baton.process.clock import Clock
from baton.transport.kv_sink import ReserveSpec
from baton.types import Lease, LeaseRef, SampledToken, SlotId, TokenRange
from generate_workers.residency.paged import PagedRow
from generate_workers.residency.port import KvBytes
from generate_workers.slots.changes import SlotChanges
from generate_workers.slots.claims import Claims
from generate_workers.slots.device_upload import DeviceUpload, FramedPiece
from generate_workers.slots.kv_memory import KvMemory
from generate_workers.slots.leases import BatchSlot, SlotClaim, SlotLedger, SlotState
from generate_workers.slots.slot_access import FrameWriter, HomeWriter, SlotReader, SlotWriter


class SlotTable:
    """All slots of one generation group, and the leases on them. Thread-safe."""

    def __init__(self, memory: KvMemory, clock: Clock, *, endpoint: str) -> None:
        """`endpoint`: address (host:port) of this group, which is written to leases. The table takes ownership of
        `memory`. Raises ConfigError if the device's staging frames are too small for the model."""
        self.max_slot_tokens = memory.shape.max_slot_tokens
        self.changes = SlotChanges()
        """Changes of slots that the engine must process. The thread that makes a change reports it, after it has
        released the lock."""
        self.memory = memory
        """KV memory of all slots. It is changed only while the table's lock is held."""
        self.layout = memory.shape.layout
        """Layout of the KV in the slots."""
        self.num_slots = memory.shape.num_slots
        self._endpoint = endpoint
        self.clock = clock
        self._lock = threading.Lock()
        self._claims = Claims(memory, clock)
        self._slots = self._claims.slots
        frames = memory.residency.frames
        self._upload = None if frames is None else DeviceUpload(frames, self.layout.row_bytes, self._note_landed)
        """Copies pieces of KV to a device with its own memory. None: pieces are written directly to the slots'
        memory."""

    # Methods of KvSink, called on the asyncio loop.

    def reserve(self, request: ReserveSpec, num_present_tokens: int = 0) -> Lease:
        """Lease a free slot for the request's first choice, and reserve one free slot for each further choice (n > 1).
        Each slot gets memory for the tokens and some growth. `num_present_tokens`: if this group prefills the prompt,
        the number of first tokens whose KV the caller writes into the slot. The caller must then call
        `complete_locally`. Raises ResourceExhaustedError if too few slots or too little memory is free, and
        InvalidArgumentError for a field out of range."""
        with self._changing():
            claim = self._claims.reserve(request, num_present_tokens)
        owner = request.request_id, request.attempt
        return Lease(claim.ref, *owner, request.num_tokens, self._endpoint, request.ttl_s, num_present_tokens)

    def check_room(self, request: ReserveSpec) -> None:
        """Raise the error that `reserve` would raise now, if any. Nothing is reserved."""
        with self._changing():
            self._claims.room(request)

    def begin_with(self, ref: LeaseRef, names: Sequence[str], block_tokens: int) -> int:
        """Put cached blocks into a leased slot that has no KV yet, if the residency policy can share blocks between
        sequences. `names`: names of the prompt's leading blocks, of `block_tokens` tokens each. Blocks are used up to
        the first one that is not cached. The caller must write the KV of the later blocks. Return the number of tokens
        of the used blocks. Raises StaleStampError or LeaseExpiredError if the lease has ended."""
        with self._changing():
            claim = self._claims.present(ref)
            row = claim.memory.row
            num_tokens = row.begin_with(names, block_tokens) if isinstance(row, PagedRow) else 0
            for layer in range(self.layout.num_layers if num_tokens else 0):
                for block in TokenRange(0, num_tokens).split(block_tokens):
                    claim.coverage.add(layer, block)
            return num_tokens

    def keep_prefix(self, ref: LeaseRef, names: Sequence[str], block_tokens: int) -> None:
        """Make the first KV blocks in a leased slot available to other sequences that have the same prefix, if the
        residency policy can share blocks. `names`: names of these blocks, of `block_tokens` tokens each. The blocks
        must be in the slot's memory. Raises StaleStampError or LeaseExpiredError if the lease has ended."""
        with self._changing():
            row = self._claims.present(ref).memory.row
            if isinstance(row, PagedRow):
                row.keep(names, block_tokens)

    def renew(self, ref: LeaseRef, ttl_s: float) -> None:
        """Set the lease's time to live to `ttl_s` seconds from now. Raises InvalidArgumentError if `ttl_s` is out of
        range, and StaleStampError or LeaseExpiredError if the lease has ended."""
        with self._changing():
            self._claims.renew(ref, ttl_s)

    @contextmanager
    def open_push(self, ref: LeaseRef) -> Iterator[SlotWriter]:
        """Renew the lease, and yield a writer, which is valid until the context ends. The slot is not given to another
        sequence before its last writer has ended and all pieces of KV are in the slot's memory. Leaving the context
        does not wait until the pieces are in the slot's memory: for this, call `settle` or `drain` of the writer.
        Raises StaleStampError or LeaseExpiredError if the lease has ended."""
        with self._changing():
            claim = self._claims.present(ref)
            self._claims.touch(claim)
            self._slots[ref.slot].num_inside += 1
        try:
            yield self._writer(claim)
        finally:
            self.leave([claim])

    async def commit(self, ref: LeaseRef, firsts: Sequence[SampledToken], wait_s: float = math.inf) -> int:
        """Wait until all KV of the lease has arrived, then commit the lease with the first token of each choice. Return
        the number of bytes of the KV. The call may be repeated, but only with the same first tokens. A cancelled call
        changes nothing.

        Raises IncompletePushError, which names the first missing range, if KV is still missing after `wait_s` seconds
        or at the lease's deadline. Raises LeaseError if the lease was committed with other first tokens,
        StaleStampError or LeaseExpiredError if it has ended, and TransferError if a piece could not be copied to the
        device.
        """
        with self._changing():
            claim = self._claims.present(ref)
        give_up_s = self.clock.now_s() + wait_s
        while (missing := self._missing(claim)) is not None:
            left_s = min(claim.deadline_s, give_up_s) - self.clock.now_s()
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
        """Commit a lease whose prompt this group's engine prefills. All cached blocks of the prompt must already be in
        the slot's memory. The engine computes the KV of all later tokens. May be called on any thread. Raises
        StaleStampError or LeaseExpiredError if the lease has ended."""
        with self._changing():
            self._claims.complete_locally(ref)

    def abort(self, ref: LeaseRef) -> None:
        """End a lease. The slot becomes free when its last writer has ended. If the lease was activated or has already
        ended, this method changes no slot. It notifies the engine instead, which must end the lease's sequences if they
        still run. Idempotent."""
        with self._changing():
            slot = self._claims.find(ref)
            if slot is not None and slot.state is not SlotState.ACTIVE:
                slot.end()
                self._claims.changed = True
                return
        self.changes.abandon(ref)

    # Methods that the engine's thread calls.

    def occupy(self, num_tokens: int, capacity_tokens: int, num_choices: int = 1) -> list[BatchSlot] | None:
        """Claim a slot for each of `num_choices` sequences that this group prefills, and return the slots. Return None
        if too few slots or too little memory is free. `num_tokens`, `capacity_tokens`: current and maximum number of
        tokens of each sequence. Raises ResourceExhaustedError if the device has less memory than configured."""
        with self._changing():
            return self._claims.occupy(num_tokens, capacity_tokens, num_choices)

    def extend(self, slot: SlotId, num_tokens: int) -> KvBytes | None:
        """Reserve memory for `num_tokens` tokens in total for an active sequence. Return None on success. If too
        little memory is free, return the number of bytes that the sequence needs in addition to those already
        reserved for it."""
        claim = self._slots[slot].claim
        assert claim is not None
        if num_tokens <= claim.memory.num_tokens:
            return None
        with self._lock:
            if self.memory.extend(claim.memory, num_tokens):
                return None
        return self.memory.residency.bytes_for(num_tokens) - claim.memory.num_bytes

    def owe(self, num_slots: int, num_bytes: KvBytes) -> None:
        """Set the number of slots and bytes that are set aside for sequences that wait to resume or to grow. New leases
        do not use them. The values replace those of the previous call."""
        with self._lock:
            self._claims.num_owed, self._claims.owed = num_slots, num_bytes

    def activate(self, ref: LeaseRef) -> list[BatchSlot] | None:
        """Activate a committed lease: its sequences join the batch. Return a `BatchSlot` for each choice. Only the
        first choice's slot has KV. Return None if the lease is not committed yet. Raises LeaseError if the lease was
        activated before, and StaleStampError or LeaseExpiredError if it has ended."""
        with self._changing():
            return self._claims.activate(ref)

    def open_read(self, ref: LeaseRef) -> SlotReader:
        """Return a reader of an active slot. The slot is not given to another sequence before the reader is closed. The
        sequence in the slot must not write KV any more, except that of its last token in a launched step."""
        with self._changing():
            slot = self._claims.active(ref)
            assert slot.claim is not None
            slot.num_inside += 1
            return SlotReader(slot.claim, self.leased_tokens, self.leave)

    def enter(self, refs: Sequence[LeaseRef]) -> list[SlotClaim]:
        """Count a launched step as a user of active slots, and return their claims. A slot that is released before
        `leave` is called, and its memory, are given to another sequence only after that call. Before it, no sequence in
        these slots may copy a page that it shares, because the step may still read that page."""
        with self._lock:
            slots = [self._claims.active(ref) for ref in refs]
            for slot in slots:
                slot.num_inside += 1
            return [slot.claim for slot in slots if slot.claim is not None]

    def leave(self, claims: Sequence[SlotClaim]) -> None:
        """End the use of the slots of `claims` by a writer, a reader or a launched step. A slot that was released
        meanwhile becomes free when its last user leaves it."""
        with self._changing():
            for claim in claims:
                self._claims.changed |= self._slots[claim.ref.slot].leave()

    def release(self, ref: LeaseRef) -> None:
        """Free the slot of a sequence that is in the batch or has ended. The sequence must not use the slot's memory
        afterwards. May be called on any thread."""
        with self._changing():
            self._claims.active(ref).end()
            self._claims.changed = True

    def leased_tokens(self, ref: LeaseRef) -> int:
        """Return the number of tokens for which the slot was leased. Raises StaleStampError or LeaseExpiredError if the
        lease has ended."""
        with self._changing():
            return self._claims.present(ref).num_tokens

    def expire(self) -> None:
        """End every lease whose deadline has passed. Committed leases that were not activated in time end as well."""
        with self._changing():
            self._claims.expire()

    def next_deadline_s(self) -> float:
        """Return the earliest deadline of all leases (Clock.now_s()); infinity if no lease exists."""
        with self._lock:
            return self._claims.next_deadline_s()

    def ledger(self) -> SlotLedger:
        """Return a snapshot of the slots and their memory. May be called on any thread."""
        with self._lock:
            return SlotLedger.of(self._slots, self.memory)

    def rest(self) -> None:
        """Wait until all queued pieces of KV are copied to the device, then stop the thread that copies them.
        Idempotent."""
        if self._upload is not None:
            self._upload.rest()

    def _writer(self, claim: SlotClaim) -> SlotWriter:
        if self._upload is None:
            return HomeWriter(claim, self._write)
        return FrameWriter(claim, self._upload, self._expect)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock. After releasing it, report a changed claim, even if the block raised."""
        changed = False
        try:
            with self._lock:
                try:
                    yield
                finally:
                    changed, self._claims.changed = self._claims.changed, False
        finally:
            if changed:
                self.changes.wake()

    def _write(self, claim: SlotClaim, layer: int, tokens: TokenRange, data: memoryview) -> bool:
        with self._changing():
            self._claims.present(claim.ref)
            assert data.nbytes == len(tokens) * self.layout.row_bytes
            is_new = claim.coverage.add(layer, tokens)
            if is_new:
                try:
                    claim.memory.row.write(layer, tokens, data).result()
                except BaseException:  # recorded as received but not written: this claim must never be committed
                    self._slots[claim.ref.slot].end()
                    self._claims.changed = True
                    raise
            self._claims.touch(claim)
            if claim.is_whole:
                claim.wake_all()
            return is_new

    def _expect(self, claim: SlotClaim, layer: int, tokens: TokenRange, parts: Sequence[TokenRange]) -> bool:
        """Record a piece as received. Each part of it counts as a writer of the slot until `_note_landed` is called for
        the part. Return False for a piece that was received before."""
        with self._changing():
            _check_failure(claim)
            self._claims.present(claim.ref)
            is_new = claim.coverage.add(layer, tokens)
            if is_new:
                claim.uploading.update((layer, part) for part in parts)
                self._slots[claim.ref.slot].num_inside += len(parts)
            self._claims.touch(claim)
            return is_new

    def _note_landed(self, pieces: Sequence[FramedPiece], failure: str) -> None:
        """Record parts of one claim as in place. End the claim if they could not be copied: their pieces are recorded
        as received, so the claim must never be committed."""
        claim = pieces[0].claim
        with self._changing():
            claim.uploading.difference_update((piece.layer, piece.tokens) for piece in pieces)
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
            for _ in pieces:
                self._claims.changed |= self._slots[claim.ref.slot].leave()

    def _missing(self, claim: SlotClaim) -> tuple[int, TokenRange] | None:
        with self._changing():
            self._claims.expire()
            _check_failure(claim)
            if not claim.expired:
                self._claims.present(claim.ref)
            return claim.coverage.first_missing() or min(claim.uploading, default=None)

    async def _wait(self, claim: SlotClaim, timeout_s: float) -> None:
        """Wait until all KV is in place, the claim has ended, or the time is up."""
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


def _check_failure(claim: SlotClaim) -> None:
    """Raise TransferError for a claim that ended because a piece could not be copied."""
    if claim.failure:
        raise TransferError(claim.failure)
