"""Random walks of sequences in pages: they share pages, copy them before they write, begin with cached blocks, and are
released while a launched step still uses them. No page is leaked, counted wrongly, or used again too early. Free pages
are NaN, and each key is a number that its sequence knows."""

import random
from dataclasses import dataclass, field

import pytest
import torch

from baton.errors import ResourceExhaustedError
from baton.modeling.kv.pages import PAGE_TOKENS
from baton.types import KvLayout, TokenRange
from generate_workers.residency.paged import PagedResidency, PagedRow
from generate_workers.residency.port import KvShape
from generate_workers.slots.kv_memory import KvMemory, MemoryLimits
from generate_workers.slots.leases import BatchSlot, SlotClaim
from generate_workers.slots.table import SlotTable
from tests.support.engines.devices import PoisonedTensorPool, TensorDevice
from tests.support.engines.slot_tables import is_empty
from tests.support.manual_clock import ManualClock

LAYOUT = KvLayout("pages", num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32")
NUM_SLOTS, MAX_TOKENS, NUM_PAGES, NUM_PREFIXES = 8, 5 * PAGE_TOKENS, 18, 3
"""The pool has fewer pages than all slots can use."""


@dataclass(eq=False)
class Sequence:
    """Sequence in a slot. The first `num_shared` tokens are those of a prefix that other sequences may have, too."""

    batch_slot: BatchSlot
    prefix: int
    num_shared: int
    keys: list[float]
    """Key of each token whose KV was written."""

    @property
    def row(self) -> PagedRow:
        assert isinstance(self.batch_slot.row, PagedRow)
        return self.batch_slot.row

    def names(self) -> list[str]:
        """Return the names of the complete blocks of the shared prefix whose KV was written."""
        num_blocks = min(self.num_shared, len(self.keys)) // PAGE_TOKENS
        return [f"{self.prefix}/{block}" for block in range(num_blocks)]


@dataclass(frozen=True)
class Launched:
    """Step that was launched and not read: it uses pages of sequences that may end meanwhile."""

    sequences: list[Sequence]
    claims: list[SlotClaim]
    pages: list[tuple[list[int], list[float]]]
    """For each sequence, its pages and keys when the step was launched."""


@dataclass
class Walk:
    """Random operations on the slots of one pool of pages."""

    rng: random.Random
    numbers: int = 0
    num_shared_blocks: int = 0
    num_late: int = 0
    open: list[Sequence] = field(default_factory=list)
    launched: list[Launched] = field(default_factory=list)

    def __post_init__(self) -> None:
        device = TensorDevice()
        shape = KvShape(LAYOUT, (None,), NUM_SLOTS, MAX_TOKENS)
        device_bytes = NUM_PAGES * PAGE_TOKENS * LAYOUT.token_bytes
        self.residency = PagedResidency(shape, device, device_bytes)
        assert isinstance(self.residency.pool.memory, PoisonedTensorPool)
        limits = MemoryLimits(1 << 40, device_bytes)
        self.slots = SlotTable(KvMemory(self.residency, shape, limits, PAGE_TOKENS), ManualClock(), endpoint="none:1")

    def step(self) -> None:
        """Run one random operation."""
        often = self.begin, self.write, self.write, self.launch, self.read
        self.rng.choice((*often, self.fork, self.keep, self.end, self.check))()

    def begin(self) -> None:
        """Begin a sequence, with the cached blocks of its prefix."""
        num_tokens = self.rng.randint(1, MAX_TOKENS - 1)
        try:
            found = self.slots.occupy(num_tokens, MAX_TOKENS)
        except ResourceExhaustedError:
            return
        if found is None:
            return
        prefix, num_shared = self.rng.randrange(NUM_PREFIXES), self.rng.choice((0, 1, 2, 3)) * PAGE_TOKENS
        made = Sequence(found[0], prefix, num_shared, [])
        names = [f"{prefix}/{block}" for block in range(min(num_shared, num_tokens) // PAGE_TOKENS)]
        num_cached = made.row.begin_with(names, PAGE_TOKENS)
        made.keys += [self.shared_key(prefix, at) for at in range(num_cached)]
        self.num_shared_blocks += num_cached // PAGE_TOKENS
        self.open.append(made)

    def write(self) -> None:
        """Write the KV of some further tokens of a sequence, as a step does. While a launched step uses the sequence,
        its last page is its own, because that step has written to it."""
        if not self.open:
            return
        sequence = self.rng.choice(self.open)
        start, is_used = len(sequence.keys), any(sequence in step.sequences for step in self.launched)
        if is_used and start % PAGE_TOKENS and self.residency.pool.is_shared(self.pages_of(sequence)[-1]):
            return
        end = min(start + self.rng.choice((1, 1, 30, 130)), MAX_TOKENS)
        if start == end or self.slots.extend(sequence.batch_slot.ref.slot, end) is not None:
            return
        sequence.row.commit(TokenRange(start, end))
        for at in range(start, end):
            self.numbers += 1
            is_shared = at < sequence.num_shared
            sequence.keys.append(self.shared_key(sequence.prefix, at) if is_shared else float(self.numbers % 65_536))
        for part, kv_T2GH in sequence.row.pages.spans(0, TokenRange(start, end)):
            kv_T2GH[:] = torch.tensor(sequence.keys[part.start : part.end]).view(-1, 1, 1, 1)

    def fork(self) -> None:
        """Give a copy of a sequence's KV to a new one."""
        if not self.open:
            return
        source = self.rng.choice(self.open)
        num_tokens = len(source.keys)
        found = self.slots.occupy(num_tokens, MAX_TOKENS) if num_tokens else None
        if found is None:
            return
        self.residency.copy(source.batch_slot.ref.slot, found[0].ref.slot, num_tokens)
        self.open.append(Sequence(found[0], source.prefix, min(source.num_shared, num_tokens), list(source.keys)))

    def keep(self) -> None:
        """Cache the complete blocks of a sequence's prefix."""
        if self.open:
            sequence = self.rng.choice(self.open)
            sequence.row.keep(sequence.names(), PAGE_TOKENS)

    def launch(self) -> None:
        """Launch a step that reads the KV of some sequences."""
        if self.open and len(self.launched) < 2:
            rows = self.rng.sample(self.open, self.rng.randint(1, len(self.open)))
            claims = self.slots.enter([row.batch_slot.ref for row in rows])
            pages = [(self.pages_of(row), list(row.keys)) for row in rows]
            self.launched.append(Launched(rows, claims, pages))

    def read(self) -> None:
        """Check that the KV that the oldest launched step reads is still in place, and end the step."""
        if self.launched:
            step = self.launched.pop(0)
            for pages, keys in step.pages:
                assert self.found(pages, len(keys)) == keys
            self.num_late += len(step.claims)
            self.slots.leave(step.claims)

    def end(self) -> None:
        """End a sequence, which a launched step may still use."""
        if self.open:
            sequence = self.open.pop(self.rng.randrange(len(self.open)))
            self.slots.release(sequence.batch_slot.ref)

    def check(self) -> None:
        """Check all keys and counts."""
        for sequence in self.open:
            assert self.found(self.pages_of(sequence), len(sequence.keys)) == sequence.keys
        ledger, pool = self.slots.ledger(), self.residency.pool
        assert not ledger.imbalance
        assert ledger.kv.num_bytes_taken <= NUM_PAGES * pool.page_bytes
        data = pool.memory.data_LPS2GH[0].flatten(1)
        is_free_P = torch.from_numpy(pool._num_owners_P == 0)
        assert data[is_free_P].isnan().all(), "a free page was written"

    def pages_of(self, sequence: Sequence) -> list[int]:
        """Return the pages of a sequence's keys."""
        return sequence.row.pages.pages_of(TokenRange(0, len(sequence.keys)))

    def found(self, pages: list[int], num_tokens: int) -> list[float]:
        """Return the first keys in some pages."""
        keys: list[float] = self.residency.pool.memory.data_LPS2GH[0, pages, :, 0].flatten().tolist()[:num_tokens]
        return keys

    def shared_key(self, prefix: int, at: int) -> float:
        """Return the key of a token of a shared prefix."""
        return -1.0 - prefix * MAX_TOKENS - at


@pytest.mark.parametrize(
    ("seed", "num_steps"), [(0, 4000), pytest.param(1, 100_000, marks=[pytest.mark.nightly, pytest.mark.timeout(1800)])]
)
def test_pages_come_back_late_and_whole(seed: int, num_steps: int) -> None:
    walk = Walk(random.Random(seed))
    for _ in range(num_steps):
        walk.step()
    assert walk.num_shared_blocks > num_steps / 100 and walk.num_late > num_steps / 20
    while walk.open:
        walk.end()
    while walk.launched:
        walk.read()
    assert is_empty(walk.slots.ledger())
    walk.residency.close()
    assert walk.residency.pool.num_taken == 0
