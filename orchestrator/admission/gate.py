"""Who may run, who waits, and who is refused.

Step 2 of a request's way (DESIGN.md, section 4). `fair_queue` says who is next; here is counted what runs, and refused
at once what has no place or no hope: when the queue is full, in all or for its tenant, and when a deadline would pass
before the first token (`forecast`). A refusal says when to come again.

A full queue gives a place to whoever has the better claim to it: a request that comes of a more urgent class, or of a
tenant that has less waiting for its weight, takes that of the one with the worst claim, which is then refused. So a
tenant that fills the queue keeps nobody else out of it.

Whoever is next and needs more slots than are free is waited for: nobody of the same or a less urgent class passes it,
while the free slots, fewer than it needs, stand idle. Those that run all end, so it waits for them and for nobody that
comes later. Letting smaller ones pass would keep those slots busy, and under load it would never find its own; a bound
on how many pass only puts the same wait off. A tenant that has reached its own bound is passed over: it waits for
itself, and the others do not wait for it.

Never waits itself: whoever joins gets an Entry to wait on, and must leave in the end. On the loop.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from baton.clock import Clock
from baton.errors import ResourceExhaustedError
from baton.types import Priority
from orchestrator.admission.fair_queue import FairQueue, Ticket
from orchestrator.admission.forecast import Turnover, predict_wait_s
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.tenants import DEFAULT_TENANT, Tenant

_SMOOTHING = 0.2
"""Weight of the newest request in the mean time that requests run."""
_LEAST_RETRY_S = 0.1
_LONGEST_RETRY_S = 60.0
_GUESSED_HOLD_S = 1.0
"""How long a request runs, for retry hints only, before one has ended."""
_SCATTER = 1.5
"""A wait in the queue is hardly ever longer than this many times the predicted one. Who is taken in an overload is
always near its deadline: without this, half of them would be late, for nothing (docs/decisions/0011-admission.md)."""
_PATIENCE_S = 60.0
"""A request without a deadline is due so long after it came: its tenant's deadlines cannot put it off for ever."""


@dataclass(frozen=True)
class Demand:
    """What a request asks for."""

    num_tokens: int
    """Of its prompt."""
    num_slots: int = 1
    """One a choice."""
    tenant: Tenant = DEFAULT_TENANT
    priority: Priority = Priority.STANDARD
    deadline_s: float | None = None
    """When it ends by itself, on the clock's now_s."""


class Entry(Ticket):
    """One request's place, in the queue or among those that run."""

    def __init__(self, demand: Demand, now_s: float) -> None:
        due_s = now_s + _PATIENCE_S if demand.deadline_s is None else demand.deadline_s
        super().__init__(demand.num_tokens, demand.num_slots, demand.tenant, demand.priority, due_s)
        self.started_s: float | None = None
        """When it left the queue to run; None while it waits."""
        self._turn = asyncio.Event()
        self._refusal: ResourceExhaustedError | None = None

    async def admitted(self) -> None:
        """Returns when it is this request's turn; raises ResourceExhaustedError when its place was given away. A
        cancelled wait changes nothing: `leave` does."""
        await self._turn.wait()
        if self._refusal is not None:
            raise self._refusal

    def start(self, now_s: float) -> None:
        """It runs from now on."""
        self.started_s = now_s
        self._turn.set()

    def refuse(self, refusal: ResourceExhaustedError) -> None:
        """Its place was given away."""
        self._refusal = refusal
        self._turn.set()


class Admission:
    """The queue, and counts of those that run. Used on the loop."""

    def __init__(self, config: OrchestratorConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._limit = config.max_running
        self._queue: FairQueue[Entry] = FairQueue()
        self._running: set[Entry] = set()
        self._num_taken = 0
        """Slots of those that run."""
        self._taken_by: Counter[str] = Counter()
        """Likewise, by tenant; none is 0."""
        self._hold_s: float | None = None
        """Smoothed seconds that a request runs; None before the first has ended."""
        self._turnover = Turnover()

    @property
    def num_queued(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of all that wait."""
        return self._queue.load.num_tokens

    @property
    def num_running(self) -> int:
        """Requests that run."""
        return len(self._running)

    def resize(self, num_slots: int) -> None:
        """The cluster has so many slots now; while it has none, whoever may run finds out for itself."""
        self._limit = min(num_slots or self._config.max_running, self._config.max_running)
        self._admit()

    def join(self, demand: Demand, chain_s: Callable[[], float] | None = None) -> Entry:
        """A place for a request; `chain_s` predicts its prefill, in seconds, and is asked for every request: what that
        takes then corrects the predictions for others.

        Raises ResourceExhaustedError, which says when to try again, for one that would have to wait where there is no
        place for it, and for one whose first token would come after its deadline. The latter only while others run or
        wait: alone, a request finds out for itself, or wrong predictions would never be corrected.
        """
        entry = Entry(demand, self._clock.now_s())
        predicted_s = None if chain_s is None else chain_s()
        if demand.deadline_s is not None and predicted_s is not None and (self._running or self._queue):
            self._check_deadline(entry, demand.deadline_s, predicted_s)
        self._queue.add(entry)
        self._admit()
        if entry.started_s is None and (why := self._why_tenant_full(entry) or self._make_room(entry)):
            self._queue.remove(entry)
            self._admit()  # nobody waits for slots because this one came
            raise self._full(entry, why)
        return entry

    def leave(self, entry: Entry) -> None:
        """Gives the place up, wherever it is; idempotent."""
        if entry in self._queue:
            self._queue.remove(entry)
        elif entry in self._running:
            self._running.remove(entry)
            self._count(entry, -1)
            assert entry.started_s is not None
            now_s = self._clock.now_s()
            self._turnover.freed(entry.num_slots, now_s)
            held_s = now_s - entry.started_s
            self._hold_s = held_s if self._hold_s is None else self._hold_s + _SMOOTHING * (held_s - self._hold_s)
        self._admit()

    def _admit(self) -> None:
        while (entry := self._queue.head(self._may_run)) is not None and self._has_room(entry):
            self._queue.take(entry)
            self._running.add(entry)
            self._count(entry, 1)
            entry.start(self._clock.now_s())
        self._turnover.waited_for(entry is not None, self._clock.now_s())

    def _has_room(self, entry: Entry) -> bool:
        """Whether there are slots; alone it may run always, and finds out for itself."""
        return not self._num_taken or self._num_taken + entry.num_slots <= self._limit

    def _may_run(self, entry: Entry) -> bool:
        """Whether its tenant may have it run, likewise."""
        num_taken, limit = self._taken_by[entry.tenant.name], entry.tenant.max_running
        return not limit or not num_taken or num_taken + entry.num_slots <= limit

    def _count(self, entry: Entry, sign: int) -> None:
        name = entry.tenant.name
        self._num_taken += sign * entry.num_slots
        self._taken_by[name] += sign * entry.num_slots
        if not self._taken_by[name]:
            del self._taken_by[name]

    def _check_deadline(self, entry: Entry, deadline_s: float, chain_s: float) -> None:
        left_s = deadline_s - self._clock.now_s()
        wait_s = self._wait_s(entry, self._hold_s)
        late_s = _SCATTER * wait_s + chain_s - left_s
        if left_s > 0 and late_s > 0:  # a deadline that has passed is no reason to come again
            raise _refusal(
                f"the first token is predicted after {wait_s:.2f} s in the queue, perhaps {_SCATTER * wait_s:.2f}, and "
                f"{chain_s:.2f} s of prefill, the deadline is in {left_s:.2f} s",
                late_s,
            )

    def _why_tenant_full(self, entry: Entry) -> str:
        """Why its tenant may not have all waiting that it has, this one included; empty while it may."""
        tenant, load = entry.tenant, self._queue.load_of(entry.tenant.name)
        for bound, num_waiting, what in (
            (tenant.max_queued, load.num_requests, "requests"),
            (tenant.max_queued_tokens, load.num_tokens, "prompt tokens"),
        ):
            if bound and num_waiting > bound:
                return f"tenant {tenant.name} may have {bound} {what} waiting, this makes {num_waiting}"
        return ""

    def _make_room(self, entry: Entry) -> str:
        """Refuses those whose claim to wait is worse, when the queue is too full with this entry; or says why there is
        no place for it, and changes nothing."""
        displaced: list[Entry] = []
        while why := self._why_full(entry):
            last = self._queue.last(entry)
            if (last.tenant.name, last.priority) == (entry.tenant.name, entry.priority):
                for each in displaced:  # a tenant's own requests do not displace each other: those waited already
                    self._queue.add(each)
                return why
            self._queue.remove(last)
            displaced.append(last)
        for each in displaced:
            each.refuse(self._full(each, "the queue is full, and a request with a better claim got this place in it"))
        return ""

    def _why_full(self, entry: Entry) -> str:
        """Why not all that wait may, this one included; empty while they may."""
        config, load = self._config, self._queue.load
        if load.num_requests > config.max_queued:
            return f"{load.num_requests - 1} requests wait already: the queue holds {config.max_queued}"
        if load.num_tokens > config.max_queued_tokens:
            return (
                f"{load.num_tokens - entry.num_tokens} prompt tokens wait already: with {entry.num_tokens} more they "
                f"would exceed the queue's {config.max_queued_tokens}"
            )
        return ""

    def _full(self, entry: Entry, why: str) -> ResourceExhaustedError:
        """For an entry that does not wait: there is room when what it would have waited for has been served."""
        return _refusal(why, self._wait_s(entry, _GUESSED_HOLD_S if self._hold_s is None else self._hold_s))

    def _wait_s(self, entry: Entry, hold_s: float | None) -> float:
        """Predicted seconds until an entry that does not wait yet would run: for slots, or for its tenant's. Where
        nobody knows how fast slots come free, requests keep theirs for `hold_s`."""
        before, tenant = self._queue.before(entry), entry.tenant
        slot_s = self._turnover.slot_s
        if slot_s is None and hold_s is not None:
            slot_s = hold_s / self._limit
        wait_s = predict_wait_s(self._limit - self._num_taken, before.num_slots, entry.num_slots, slot_s)
        if not tenant.max_running or hold_s is None:
            return wait_s
        num_free = tenant.max_running - self._taken_by[tenant.name]
        own_slot_s = hold_s / tenant.max_running
        return max(wait_s, predict_wait_s(num_free, before.num_own_slots, entry.num_slots, own_slot_s))


def _refusal(why: str, retry_s: float) -> ResourceExhaustedError:
    retry_s = min(max(retry_s, _LEAST_RETRY_S), _LONGEST_RETRY_S)
    return ResourceExhaustedError(f"{why}: try again in {retry_s:.1f} s", retry_after_s=retry_s)
