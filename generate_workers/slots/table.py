"""Slots of a generation group. A slot is memory for one sequence of the batch. Claims on slots have deadlines and
fencing stamps.

Callers by thread:

- `baton.transport.kv_receiver` leases, pushes and commits on the process's asyncio loop. For it the table is a
  baton.transport.kv_sink.KvSink.
- `engine.core` calls `occupy`, `activate`, `expire` and `release` on the engine's thread.
- `prefixes` copies blocks into slots and answers out of them on its own threads. It releases slots whose answers it has
  copied.

One lock guards the bookkeeping (`claims`). It is held for bookkeeping and, if KV is written in place, while one piece
is copied, but never while waiting. `device_upload` copies pieces to a device with its own memory, without the lock.
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
    """All slots of one generation group. Thread-safe."""

    def __init__(self, memory: KvMemory, clock: Clock, *, endpoint: str) -> None:
        """`endpoint`: address (host:port) that is written to leases. The table takes ownership of `memory`. Raises
        ConfigError if the device's staging frames are too small for the model."""
        self.max_slot_tokens = memory.shape.max_slot_tokens
        self.changes = SlotChanges()
        """Changes for the engine. They are reported on the thread that makes the change, after the lock was
        released."""
        self.memory = memory
        """KV memory of all slots. Changed only under the table's lock."""
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
        """Copies pieces to a device with its own memory. None: pieces are written in place."""

    # Methods of KvSink, called on the asyncio loop.

    def reserve(self, request: ReserveSpec, num_present_tokens: int = 0) -> Lease:
        """Lease a free slot, with memory for its tokens and some growth, and hold another slot for each further choice.
        The caller must write the KV of the first `num_present_tokens` tokens. If no rank pushes KV, it must then call
        `complete_locally`. Raises ResourceExhaustedError if too few slots or too little memory is free,
        InvalidArgumentError for a field out of range."""
        with self._changing():
            claim = self._claims.reserve(request, num_present_tokens)
        owner = request.request_id, request.attempt
        return Lease(claim.ref, *owner, request.num_tokens, self._endpoint, request.ttl_s, num_present_tokens)

    def check_room(self, request: ReserveSpec) -> None:
        """Check whether `reserve` would succeed now. Raises the same errors as `reserve`."""
        with self._changing():
            self._claims.room(request)

    def begin_with(self, ref: LeaseRef, names: Sequence[str], block_tokens: int) -> int:
        """Begin a new, empty lease with those leading blocks of `names` that the policy can share from other sequences.
        Return the number of tokens of these blocks; the caller must write the other blocks. Raises StaleStampError or
        LeaseExpiredError if the lease has ended."""
        with self._changing():
            claim = self._claims.present(ref)
            row = claim.memory.row
            num_tokens = row.begin_with(names, block_tokens) if isinstance(row, PagedRow) else 0
            for layer in range(self.layout.num_layers if num_tokens else 0):
                for block in TokenRange(0, num_tokens).split(block_tokens):
                    claim.coverage.add(layer, block)
            return num_tokens

    def keep_prefix(self, ref: LeaseRef, names: Sequence[str], block_tokens: int) -> None:
        """Share a slot's first blocks, whose KV must be in place, with sequences that have the same prefix, if the
        policy supports sharing. Raises StaleStampError or LeaseExpiredError when the lease has ended."""
        with self._changing():
            row = self._claims.present(ref).memory.row
            if isinstance(row, PagedRow):
                row.keep(names, block_tokens)

    def renew(self, ref: LeaseRef, ttl_s: float) -> None:
        """Set the lease's time to live to `ttl_s` seconds from now. Raises InvalidArgumentError for a bad `ttl_s`,
        StaleStampError or LeaseExpiredError when the lease has ended."""
        with self._changing():
            self._claims.renew(ref, ttl_s)

    @contextmanager
    def open_push(self, ref: LeaseRef) -> Iterator[SlotWriter]:
        """Renew the lease, and yield a writer that counts until the context ends. The slot is not claimed again before
        its last writer has ended and all pieces are in place. The end of the context does not wait for pieces: see
        SlotWriter. Raises StaleStampError or LeaseExpiredError if the lease has ended."""
        with self._changing():
            claim = self._claims.present(ref)
            self._claims.touch(claim)
            self._slots[ref.slot].num_inside += 1
        try:
            yield self._writer(claim)
        finally:
            self._leave(claim)

    async def commit(self, ref: LeaseRef, firsts: Sequence[SampledToken], wait_s: float = math.inf) -> int:
        """Commit the lease with each choice's first token as soon as all KV is in place, and return the number of bytes
        of the KV. Waits for missing KV for at most `wait_s` seconds, and at most until the lease expires; then raises
        IncompletePushError, which names the first missing range. Idempotent for the same first tokens; other tokens
        raise LeaseError. Raises StaleStampError if the lease was aborted meanwhile, TransferError if a piece could not
        be copied to the device. A cancelled call changes nothing."""
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
        """Commit a lease whose copied blocks are all in place. The engine computes the rest of its prompt. Any thread.
        Raises StaleStampError or LeaseExpiredError when the lease has ended."""
        with self._changing():
            self._claims.complete_locally(ref)

    def abort(self, ref: LeaseRef) -> None:
        """End the lease; the slot becomes free when its last writer has ended. If the lease was activated, the engine
        is notified instead, and must end its sequences. Idempotent. A stale stamp changes no slot, but the engine is
        notified as well."""
        with self._changing():
            slot = self._claims.find(ref)
            if slot is not None and slot.state is not SlotState.ACTIVE:
                slot.end()
                self._claims.changed = True
                return
        self.changes.abandon(ref)

    # Methods that the engine's thread calls.

    def occupy(self, num_tokens: int, capacity_tokens: int, num_choices: int = 1) -> list[BatchSlot] | None:
        """Claim slots for `num_choices` sequences of `num_tokens` tokens each, which this engine prefills, and return
        the slots; None if too few slots or too little memory is free. Raises ResourceExhaustedError if the device has
        less memory than configured."""
        with self._changing():
            return self._claims.occupy(num_tokens, capacity_tokens, num_choices)

    def extend(self, slot: SlotId, num_tokens: int) -> KvBytes | None:
        """Promise an active sequence memory for `num_tokens` tokens in total. Return None on success, else the bytes
        that the sequence needs in addition to its promise."""
        claim = self._slots[slot].claim
        assert claim is not None
        if num_tokens <= claim.memory.num_tokens:
            return None
        with self._lock:
            if self.memory.extend(claim.memory, num_tokens):
                return None
        return self.memory.residency.bytes_for(num_tokens) - claim.memory.num_bytes

    def owe(self, num_slots: int, num_bytes: KvBytes) -> None:
        """Reserve slots and memory for sequences that wait to resume or to grow. New leases do not use them."""
        with self._lock:
            self._claims.num_owed, self._claims.owed = num_slots, num_bytes

    def activate(self, ref: LeaseRef) -> list[BatchSlot] | None:
        """Activate a committed lease, and return a `BatchSlot` per choice, of which only the first has KV; None before
        the commit. Raises LeaseError if the lease was activated before, StaleStampError or LeaseExpiredError if it has
        ended."""
        with self._changing():
            return self._claims.activate(ref)

    def open_read(self, ref: LeaseRef) -> SlotReader:
        """Return a reader of an active slot, which counts as a user of the slot until it is closed. The slot's sequence
        must not write any more KV."""
        with self._changing():
            slot = self._claims.active(ref)
            assert slot.claim is not None
            slot.num_inside += 1
            return SlotReader(slot.claim, self.leased_tokens, self._leave)

    def release(self, ref: LeaseRef) -> None:
        """Free the slot of a sequence that runs or has ended. The sequence must not use its memory again. Any
        thread."""
        with self._changing():
            self._claims.active(ref).end()
            self._claims.changed = True

    def leased_tokens(self, ref: LeaseRef) -> int:
        """Return the number of tokens for which the lease was made. Raises StaleStampError or LeaseExpiredError if the
        lease has ended."""
        with self._changing():
            return self._claims.present(ref).num_tokens

    def expire(self) -> None:
        """End every lease whose deadline has passed, including committed ones that were not activated."""
        with self._changing():
            self._claims.expire()

    def next_deadline_s(self) -> float:
        """Return the earliest deadline of all leases (Clock.now_s()); infinity if no lease exists."""
        with self._lock:
            return self._claims.next_deadline_s()

    def ledger(self) -> SlotLedger:
        """Return a snapshot of the slots and their memory. Any thread."""
        with self._lock:
            return SlotLedger.of(self._slots, self.memory)

    def rest(self) -> None:
        """Wait until all pieces are copied to the device, and end the upload's thread. Idempotent."""
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

    def _note_landed(self, piece: FramedPiece, failure: str) -> None:
        """Record a part as in place. End the claim if the part could not be copied: its piece is recorded as received,
        so the claim must never be committed."""
        claim = piece.claim
        with self._changing():
            claim.uploading.remove((piece.layer, piece.tokens))
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

    def _leave(self, claim: SlotClaim) -> None:
        with self._changing():
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
