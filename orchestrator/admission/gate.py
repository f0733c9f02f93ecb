"""Decides which requests run, which wait, and which are refused; docs/decisions/0011-admission.md says why so.

Called by `orchestrator.scheduler`. `orchestrator.composition` passes in the policy that says which request is next
(`orchestrator.admission.queue_policy`). This module counts the slots in use, and refuses at once, with a time after
which to retry, a request that has no place or no chance: when the queue is full, in all or for its tenant, and when its
deadline would pass before the first token (`orchestrator.admission.forecast`). A full queue gives a place to a request
of a tenant that has less waiting for its weight, or to a more urgent one of the same tenant; the one with the worst
claim is refused.

When the next request needs more slots than are free, no later request of its tenant or of others passes it, while the
free slots stay idle: all running requests end, so it waits for these and for none that comes later. If smaller ones
passed it, it would never find its slots under load. Only a tenant that has reached its own bound is passed over.

No method of Admission waits: `join` returns an Entry to wait on, for which `leave` must be called in the end. On the
loop.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from baton.errors import ResourceExhaustedError
from baton.process.clock import Clock
from baton.types import Priority
from orchestrator.admission.forecast import Turnover, predict_wait_s
from orchestrator.admission.queue_policy import QueuePolicy, Totals, Waiter
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.tenants import Tenant

_SMOOTHING = 0.2
"""Weight of the newest request in the mean time for which requests run."""
_LEAST_RETRY_S = 0.1
_LONGEST_RETRY_S = 60.0
_GUESSED_HOLD_S = 1.0
"""Assumed seconds for which a request runs, for retry hints only, before any request has ended."""
_SCATTER = 1.5
"""Factor by which a wait in the queue hardly ever exceeds its prediction. In an overload each admitted request is near
its deadline: without this allowance half of them would be late, and their work wasted
(docs/decisions/0011-admission.md)."""
_PATIENCE_S = 60.0
"""Seconds after which each request counts as due, so that those with near deadlines do not always pass the others."""


class QueuedRequest(Protocol):
    """The properties of a request that decide about its place; `orchestrator.requests.request.Request` has them."""

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that the request's tenant pays with."""

    @property
    def num_slots(self) -> int:
        """Return the number of slots that the request needs."""

    @property
    def tenant(self) -> Tenant:
        """Return the tenant that sent the request."""

    @property
    def priority(self) -> Priority:
        """Return the request's priority class."""

    @property
    def deadline_s(self) -> float | None:
        """Return the time of the gate's clock at which the request ends by itself; None for no deadline."""


class Entry(Waiter):
    """One request's place, in the queue or among the running requests."""

    def __init__(self, request: QueuedRequest, now_s: float) -> None:
        patience_end_s = now_s + _PATIENCE_S
        due_s = patience_end_s if request.deadline_s is None else min(patience_end_s, request.deadline_s)
        super().__init__(request.num_tokens, request.num_slots, request.tenant, request.priority, due_s)
        self.started_s: float | None = None
        """Time when the request left the queue to run; None while it waits."""
        self.on_turn: Callable[[], None] | None = None
        """Called once a waiting request leaves the queue, to run or refused; for callers that do not wait by a task.
        Must change nothing in the gate."""
        self._turn = asyncio.Event()
        self._refusal: ResourceExhaustedError | None = None

    async def admitted(self) -> None:
        """Wait until it is this request's turn. Raises ResourceExhaustedError when its place was given to another.

        Cancelling the wait changes nothing: the caller must still call `leave`.
        """
        await self._turn.wait()
        if self._refusal is not None:
            raise self._refusal

    def start(self, now_s: float) -> None:
        """Record that the request runs from now on, and wake its waiter."""
        self.started_s = now_s
        self._tell()

    def refuse(self, refusal: ResourceExhaustedError) -> None:
        """Record that the request's place was given to another, and wake its waiter, which raises `refusal`."""
        self._refusal = refusal
        self._tell()

    def _tell(self) -> None:
        self._turn.set()
        if self.on_turn is not None:
            self.on_turn()


class Admission:
    """The queue, and the counts of running requests. Used on the loop."""

    def __init__(self, config: OrchestratorConfig, clock: Clock, queue: QueuePolicy[Entry]) -> None:
        """`queue` says which request is next; it is empty, and the gate alone uses it."""
        self._config = config
        self._clock = clock
        self._limit = config.max_running
        self._queue = queue
        self._waiting: set[Entry] = set()
        self._totals = Totals()
        """Totals over all waiting requests."""
        self._totals_of: dict[str, Totals] = {}
        """Totals over the waiting requests of each tenant; tenants without any are absent."""
        self._running: set[Entry] = set()
        self._num_taken = 0
        """Slots of all running requests."""
        self._taken_by: Counter[str] = Counter()
        """Slots of running requests, by tenant; tenants without any are absent."""
        self._hold_s: float | None = None
        """Smoothed seconds for which a request runs; None before the first has ended."""
        self._turnover = Turnover()

    @property
    def num_queued(self) -> int:
        return len(self._waiting)

    @property
    def num_queued_tokens(self) -> int:
        """Return the number of prompt tokens over all waiting requests."""
        return self._totals.num_tokens

    @property
    def num_running(self) -> int:
        return len(self._running)

    def resize(self, num_slots: int, *, is_asleep: bool = False) -> None:
        """Set the number of the cluster's slots, and admit requests that now fit. With 0 slots only the configured
        limit holds, so that requests run and fail by themselves if no group comes; but while the groups are asleep,
        all but one request wait in the queue until one is up."""
        most = 1 if is_asleep else self._config.max_running
        self._limit = min(num_slots or most, self._config.max_running)
        self._admit()

    def join(self, request: QueuedRequest, chain_s: float | None = None) -> Entry:
        """Queue a request, which may run at once, and return its place; `chain_s` are the predicted seconds of its
        prefill, None without a prediction.

        Raises ResourceExhaustedError with a retry delay for a request that would have to wait and has no place in the
        queue, and for one whose first token would come after its deadline. The latter only while other requests run or
        wait: a request that is alone is always admitted, or wrong predictions would never be corrected.
        """
        entry = Entry(request, self._clock.now_s())
        if request.deadline_s is not None and chain_s is not None and (self._running or self._waiting):
            self._check_deadline(entry, request.deadline_s, chain_s)
        self._add(entry)
        self._admit()
        if entry.started_s is None and (why := self._why_tenant_full(entry) or self._make_room(entry)):
            self._remove(entry)
            self._admit()  # entries behind the removed one no longer wait for it
            raise self._full(entry, why)
        return entry

    def leave(self, entry: Entry) -> None:
        """Give up a request's place, whether it waits or runs, and admit the next; idempotent."""
        if entry in self._waiting:
            self._remove(entry)
        elif entry in self._running:
            self._running.remove(entry)
            self._count(entry, -1)
            assert entry.started_s is not None
            now_s = self._clock.now_s()
            self._turnover.freed(entry.num_slots, now_s)
            held_s = now_s - entry.started_s
            self._hold_s = held_s if self._hold_s is None else self._hold_s + _SMOOTHING * (held_s - self._hold_s)
        self._admit()

    def _add(self, entry: Entry) -> None:
        self._queue.add(entry)
        self._waiting.add(entry)
        self._totals.add(entry)
        self._totals_of.setdefault(entry.tenant.name, Totals()).add(entry)

    def _remove(self, entry: Entry, *, is_served: bool = False) -> None:
        self._queue.remove(entry, is_served=is_served)
        self._waiting.remove(entry)
        self._totals.add(entry, -1)
        left = self._totals_of[entry.tenant.name]
        left.add(entry, -1)
        if not left.num_requests:
            del self._totals_of[entry.tenant.name]

    def _admit(self) -> None:
        while (entry := self._queue.head(self._may_run)) is not None and self._has_room(entry):
            self._remove(entry, is_served=True)
            self._running.add(entry)
            self._count(entry, 1)
            entry.start(self._clock.now_s())
        self._turnover.waited_for(entry is not None, self._clock.now_s())

    def _has_room(self, entry: Entry) -> bool:
        """Return whether enough slots are free; a request may always run alone, even with more choices than slots."""
        return not self._num_taken or self._num_taken + entry.num_slots <= self._limit

    def _may_run(self, entry: Entry) -> bool:
        """Return whether the tenant's bound allows the request to run; a tenant's request may always run alone."""
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
        if left_s > 0 and late_s > 0:  # after the deadline a retry is pointless
            raise _refusal(
                f"the first token is predicted after {wait_s:.2f} s in the queue, perhaps {_SCATTER * wait_s:.2f}, and "
                f"{chain_s:.2f} s of prefill, the deadline is in {left_s:.2f} s",
                late_s,
            )

    def _why_tenant_full(self, entry: Entry) -> str:
        """Return the reason why the tenant has too much waiting, including this entry; "" if it has not."""
        tenant = entry.tenant
        totals = self._totals_of.get(tenant.name, Totals())
        for bound, num_waiting, what in (
            (tenant.max_queued_requests, totals.num_requests, "requests"),
            (tenant.max_queued_tokens, totals.num_tokens, "prompt tokens"),
        ):
            if bound and num_waiting > bound:
                return f"tenant {tenant.name} may have {bound} {what} waiting, this makes {num_waiting}"
        return ""

    def _make_room(self, entry: Entry) -> str:
        """Refuse entries with a weaker claim until the queue has room for this one, and return "". If that cannot make
        room, change nothing and return the reason."""
        displaced: list[Entry] = []
        while why := self._why_full(entry):
            last = self._queue.last(entry)
            if (last.tenant.name, last.priority) == (entry.tenant.name, entry.priority):
                for each in displaced:  # a tenant's requests do not displace each other: the earlier ones waited
                    self._add(each)
                return why
            self._remove(last)
            displaced.append(last)
        for each in displaced:
            each.refuse(self._full(each, "the queue is full, and a request with a better claim got this place in it"))
        return ""

    def _why_full(self, entry: Entry) -> str:
        """Return the reason why the queue holds too much, including this entry; "" if it does not."""
        config, totals = self._config, self._totals
        if totals.num_requests > config.max_queued_requests:
            return f"{totals.num_requests - 1} requests wait already: the queue holds {config.max_queued_requests}"
        if totals.num_tokens > config.max_queued_tokens:
            return (
                f"{totals.num_tokens - entry.num_tokens} prompt tokens wait already: with {entry.num_tokens} more they "
                f"would exceed the queue's {config.max_queued_tokens}"
            )
        return ""

    def _full(self, entry: Entry, why: str) -> ResourceExhaustedError:
        """Return the refusal of an entry that gets no place; the retry delay is how long it would have waited."""
        return _refusal(why, self._wait_s(entry, _GUESSED_HOLD_S if self._hold_s is None else self._hold_s))

    def _wait_s(self, entry: Entry, hold_s: float | None) -> float:
        """Return the predicted seconds until an entry that does not wait yet would run.

        Counts the wait for slots and for the tenant's bound. Where it is unknown how fast slots come free, requests are
        taken to keep theirs for `hold_s` seconds.
        """
        (num_before, num_own_before), tenant = self._queue.before(entry), entry.tenant
        slot_s = self._turnover.slot_s
        if slot_s is None and hold_s is not None:
            slot_s = hold_s / self._limit
        wait_s = predict_wait_s(self._limit - self._num_taken, num_before, entry.num_slots, slot_s)
        if not tenant.max_running or hold_s is None:
            return wait_s
        num_free = tenant.max_running - self._taken_by[tenant.name]
        own_slot_s = hold_s / tenant.max_running
        return max(wait_s, predict_wait_s(num_free, num_own_before, entry.num_slots, own_slot_s))


def _refusal(why: str, retry_s: float) -> ResourceExhaustedError:
    retry_s = min(max(retry_s, _LEAST_RETRY_S), _LONGEST_RETRY_S)
    return ResourceExhaustedError(f"{why}: try again in {retry_s:.1f} s", retry_after_s=retry_s)
