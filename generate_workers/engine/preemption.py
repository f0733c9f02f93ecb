"""Running sequences: their slots, the plan of the next step, and preemption when memory is short.

`engine.core` adds and removes sequences (class Row), `scheduling_policy` plans their tokens, and `slots.table` provides
memory. A sequence needs more memory as it grows. When no memory is free, the youngest sequence releases its memory and
waits. It resumes before any new sequence joins. It then prefills all its tokens again, prompt and output, so that its
stream continues. In fp32 it gets the same tokens as without preemption. In bf16 the tokens may differ, because a
chunked prefill rounds differently from decode steps.

A request that does not fit into memory even if it is the only request is refused at the start. The oldest sequence can
therefore always run, although it may have to wait for memory that is leased. Leases end at their deadlines, and new
leases do not get the memory that the oldest sequence needs.

Owned by the engine's thread.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import attrgetter

from baton.errors import ResourceExhaustedError
from baton.types import SlotId
from generate_workers.engine.rows import Row
from generate_workers.engine.scheduling_policy import SchedulingPolicy, StepPlan
from generate_workers.engine.speculation import Speculation
from generate_workers.residency.port import KvBytes
from generate_workers.slots.leases import BatchSlot
from generate_workers.slots.table import SlotTable

_AGE = attrgetter("age")


@dataclass
class RunningRows:
    """Sequences in the batch, and preempted sequences that wait to resume."""

    slots: SlotTable
    scheduling_policy: SchedulingPolicy
    speculation: Speculation | None = None
    reclaim: Callable[[], bool] | None = None
    """Function that releases slots of ended sequences when memory is short. Returns True if it released any. None: such
    slots do not exist."""
    rows: dict[SlotId, Row] = field(default_factory=dict)
    """Sequences in the batch by slot, in the order in which they joined. The first choice of a request is the leader,
    and its other choices are followers. Followers join when the leader's KV is complete."""
    waiting: list[Row] = field(default_factory=list)
    """Preempted sequences, with the oldest first. Followers (further choices of a request) wait together with their
    leader."""
    watched: list[Row] = field(default_factory=list)
    """Leaders (first choices of requests), including preempted ones, that had received fewer than NUM_WATCHED_TOKENS
    tokens from this engine at the last call of `watched_in`. Their requests may be the cause of a crash, and are
    written to the crash note (a file that is read after a crash)."""
    num_preemptions: int = 0
    is_stalled: bool = False
    """True if the last plan was empty because the only sequence in the batch waits for memory that leases hold."""
    _growth: KvBytes = field(default=KvBytes(), init=False)
    """Bytes that the oldest sequence without enough memory needs in addition to the memory that is already reserved for
    it. New leases do not get these bytes. 0 if no sequence lacks memory."""

    def add(self, rows: list[Row]) -> None:
        """Add the sequences of a stream, one for each choice. The first becomes the leader and joins the batch. The
        others become its followers, and join the batch later, in `fork`."""
        leader = rows[0]
        leader.followers = rows[1:]
        self.rows[leader.slot] = leader
        self.watched.append(leader)

    def watched_in(self, plan: StepPlan) -> tuple[bytes, ...]:
        """Return the fingerprints of those requests of the plan whose first choice has received fewer than
        NUM_WATCHED_TOKENS tokens from this engine. They are written to the crash note (a file that is read after a
        crash), because one of them may be the cause of a crash."""
        if not self.watched:
            return ()
        self.watched = [row for row in self.watched if row.is_watched]
        planned = {span.slot for span in plan.spans}
        computed = (row for row in self.watched if row.batch_slot is not None and row.slot in planned)
        return tuple(row.stream.request.fingerprint for row in computed)

    def fork(self, leader: Row) -> None:
        """Copy the leader's KV to its followers (the other choices of the request), and add the followers to the batch.
        The KV of all known tokens of the leader must be complete."""
        followers, leader.followers = leader.followers, []
        for row in followers:
            self.slots.memory.residency.copy(leader.slot, row.slot, leader.num_known)
            row.num_cached = leader.num_known
            self.rows[row.slot] = row

    def ran(self, plan: StepPlan) -> None:
        """Record that a plan was run. The KV of the plan's tokens is then complete."""
        for span in plan.spans:
            row = self.rows[span.slot]
            assert row.num_cached == span.tokens.start
            row.num_cached = span.tokens.end

    def retire(self, row: Row) -> None:
        """Remove a sequence that has got its last token. Its slot is freed, unless the stream's hook takes the slot
        over."""
        hook = row.stream.hook
        self._unseat([row], frees=hook is None or not hook.take_row(row))

    def remove(self, row: Row) -> None:
        """Remove a sequence that has not got its last token, and free its slot and memory."""
        if row in self.waiting:
            self.waiting.remove(row)
            self._owe()
        self._unseat([row])

    def resume(self) -> bool:
        """Resume preempted sequences, with the oldest first, while slots and memory are free. Return True if no
        preempted sequence is left. Raises ResourceExhaustedError if the oldest sequence cannot get memory although no
        sequence runs."""
        if not self.waiting:
            return True
        while self.waiting:
            leader = self.waiting[0]
            rows = [leader, *leader.followers]
            batch_slots = self._batch_slots_for(leader, len(rows))
            if batch_slots is None:
                break
            self.waiting.pop(0)
            for row, batch_slot in zip(rows, batch_slots, strict=True):
                row.batch_slot, row.num_cached = batch_slot, 0
            self.rows[leader.slot] = leader
        self._owe()
        return not self.waiting

    def plan(self, *, ahead: bool = False) -> StepPlan:
        """Return the plan of the next step, and reserve memory for all its sequences. When memory is short, slots of
        ended sequences are released first. If this is not enough, the youngest sequences are preempted, one at a time.

        `ahead`: the tokens of the step before are unread. Sequences whose unread token is their last are left out. The
        plan is empty when memory is short, because the step before must be read before sequences are preempted."""
        self.is_stalled = False
        while True:
            rows = {slot: row for slot, row in self.rows.items() if row.num_left} if ahead else self.rows
            plan = self.scheduling_policy.plan(rows)
            short = self._without_memory(plan)
            if short is None:
                return plan if self.speculation is None else self.speculation.plan(plan, self.rows)
            if ahead:
                return StepPlan(())
            if self.reclaim is not None and self.reclaim():
                continue
            youngest = max(self.rows.values(), key=_AGE)
            if youngest is short and len(self.rows) == 1:
                self.is_stalled = True
                return StepPlan(())
            self._preempt(youngest)

    def _without_memory(self, plan: StepPlan) -> Row | None:
        """Promise memory to the plan's sequences. Return the oldest sequence for which no memory is free; None if all
        have memory. New leases do not use the bytes that this sequence lacks."""
        ends = {span.slot: span.tokens.end for span in plan.spans}
        for row in sorted((self.rows[slot] for slot in ends), key=_AGE):
            if (missing := self.slots.extend(row.slot, ends[row.slot])) is not None:
                self._owe_growth(missing)
                return row
        self._owe_growth(KvBytes())
        return None

    def _batch_slots_for(self, leader: Row, num_rows: int) -> list[BatchSlot] | None:
        try:
            return self.slots.occupy(leader.num_known, leader.capacity_tokens, num_rows)
        except ResourceExhaustedError:
            if self.rows:  # running sequences release memory when they end
                return None
            raise

    def _preempt(self, leader: Row) -> None:
        """Preempt a leader and its followers. Their memory is reserved for them before it is freed, so that no new
        lease takes it."""
        self.num_preemptions += 1
        self.waiting.append(leader)
        self.waiting.sort(key=_AGE)
        self._owe()
        self._unseat([leader, *leader.followers])

    def _unseat(self, rows: Iterable[Row], *, frees: bool = True) -> None:
        for row in rows:
            batch_slot, row.batch_slot = row.batch_slot, None
            if self.speculation is not None:
                self.speculation.forget(row)
            if batch_slot is None:  # the sequence is preempted
                continue
            self.rows.pop(batch_slot.ref.slot, None)  # a follower has not joined yet
            if frees:
                self.slots.release(batch_slot.ref)

    def _owe_growth(self, num_bytes: KvBytes) -> None:
        if num_bytes != self._growth:
            self._growth = num_bytes
            self._owe()

    def _owe(self) -> None:
        need, num_slots = self._growth, 0
        for row in self.waiting:
            num_rows = 1 + len(row.followers)
            num_slots += num_rows
            need += self.slots.memory.need(row.num_known, row.capacity_tokens, num_rows)
        self.slots.owe(num_slots, need)
