"""Decides which requests run, wait, or are refused. docs/decisions/0011-admission.md explains the reasons.

Called by `orchestrator.scheduler`. `orchestrator.composition` passes in the policy that selects the next request
(`orchestrator.admission.queue_policy`). This module counts the slots in use. It refuses a request at once, with a retry
delay, in two cases: the queue is full, in total or for the request's tenant; or the deadline would pass before the
first token (`orchestrator.admission.forecast`). A full queue still accepts some requests: those of a tenant that has
fewer waiting tokens relative to its weight, and those that are more urgent than others of the same tenant. The policy
then selects another waiting request, which is refused instead.

If the next request needs more slots than are free, no later request is served before it, and the free slots stay idle.
The request gets its slots when running requests end. If smaller requests were served first, it would never get enough
slots under load. Only a tenant that has reached its own limit of running requests is skipped.

No method of Admission waits. `join` returns an Entry to wait on, and `leave` must be called for it at the end. Runs on
the asyncio loop.
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
"""Weight of the latest request in the moving average of the time for which requests run."""
_LEAST_RETRY_S = 0.1
_LONGEST_RETRY_S = 60.0
_GUESSED_HOLD_S = 1.0
"""Assumed number of seconds for which a request runs. Used only for retry delays, until the first request has ended."""
_SCATTER = 1.5
"""Safety factor for the predicted wait in the queue. The actual wait is almost never longer than the predicted wait
times this factor. The factor matters in an overload, when the first tokens of many admitted requests are predicted just
before their deadlines. Without the factor, half of these requests would be late, and their work wasted
(docs/decisions/0011-admission.md)."""
_PATIENCE_S = 60.0
"""Maximum number of seconds between a request's arrival and its due time. A request without a deadline, or with a
deadline after this time, is due at the end of this time. This prevents requests with early deadlines from always being
served first."""


class QueuedRequest(Protocol):
    """Properties of a request that the gate needs. `orchestrator.requests.request.Request` implements them."""

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that are charged to the request's tenant."""

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
        """Return the time, on the gate's clock, at which the request is ended if it is not complete; None for no
        deadline."""


class Entry(Waiter):
    """One request that waits in the queue or runs."""

    def __init__(self, request: QueuedRequest, now_s: float) -> None:
        patience_end_s = now_s + _PATIENCE_S
        due_s = patience_end_s if request.deadline_s is None else min(patience_end_s, request.deadline_s)
        super().__init__(request.num_tokens, request.num_slots, request.tenant, request.priority, due_s)
        self.started_s: float | None = None
        """Time at which the request left the queue to run; None while it waits."""
        self.on_turn: Callable[[], None] | None = None
        """Callback for callers that do not wait in `admitted`. It is called when the request leaves the queue to run,
        and when it is refused. It must not add or remove requests."""
        self._turn = asyncio.Event()
        self._refusal: ResourceExhaustedError | None = None

    async def admitted(self) -> None:
        """Wait until the request may run. Raises ResourceExhaustedError if it is removed from the queue in favour of
        another request.

        If the wait is cancelled, the entry stays in the queue. The caller must then still call `leave`.
        """
        await self._turn.wait()
        if self._refusal is not None:
            raise self._refusal

    def start(self, now_s: float) -> None:
        """Record that the request runs from now on, and wake the task that waits in `admitted`."""
        self.started_s = now_s
        self._tell()

    def refuse(self, refusal: ResourceExhaustedError) -> None:
        """Record that the request was removed from the queue. `admitted` raises `refusal` in the task that waits for
        it."""
        self._refusal = refusal
        self._tell()

    def _tell(self) -> None:
        self._turn.set()
        if self.on_turn is not None:
            self.on_turn()


class Admission:
    """Queue of waiting requests, and count of the slots of running requests. Used on the asyncio loop."""

    def __init__(self, config: OrchestratorConfig, clock: Clock, queue: QueuePolicy[Entry]) -> None:
        """`queue` is the policy that selects the next request. It must be empty, and is used only by this gate."""
        self._config = config
        self._clock = clock
        self._limit = config.max_running
        self._queue = queue
        self._waiting: set[Entry] = set()
        self._totals = Totals()
        """Numbers of requests, tokens and slots of all waiting requests."""
        self._totals_of: dict[str, Totals] = {}
        """Numbers of requests, tokens and slots of each tenant's waiting requests. Tenants without waiting requests
        have no entry."""
        self._running: set[Entry] = set()
        self._num_taken = 0
        """Total number of slots of all running requests."""
        self._taken_by: Counter[str] = Counter()
        """Number of slots of running requests, by tenant. Tenants without running requests are absent."""
        self._hold_s: float | None = None
        """Moving average of the number of seconds for which requests run; None before the first request has ended."""
        self._turnover = Turnover()

    @property
    def num_queued(self) -> int:
        return len(self._waiting)

    @property
    def num_queued_tokens(self) -> int:
        """Return the number of prompt tokens of all waiting requests."""
        return self._totals.num_tokens

    @property
    def num_running(self) -> int:
        return len(self._running)

    def resize(self, num_slots: int, *, is_asleep: bool = False) -> None:
        """Set the number of slots of the cluster, and admit the requests that may run now.

        If `num_slots` is 0 and `is_asleep` is False, requests are admitted up to the configured limit. They fail if no
        group joins the cluster. If `num_slots` is 0 and `is_asleep` is True, the groups have been stopped because there
        was no traffic. One request is then admitted, and all others wait until a group has started.
        """
        most = 1 if is_asleep else self._config.max_running
        self._limit = min(num_slots or most, self._config.max_running)
        self._admit()

    def join(self, request: QueuedRequest, chain_s: float | None = None) -> Entry:
        """Add a request to the queue, admit it if possible, and return its entry. `chain_s` is the predicted duration
        of its prefill in seconds; None if there is no prediction.

        Raises ResourceExhaustedError with a retry delay if the request would have to wait and the queue is full, or if
        its first token is predicted to come after its deadline. The deadline is checked only while other requests run
        or wait: if a request that is alone could be refused, wrong predictions might never be corrected.
        """
        entry = Entry(request, self._clock.now_s())
        if request.deadline_s is not None and chain_s is not None and (self._running or self._waiting):
            self._check_deadline(entry, request.deadline_s, chain_s)
        self._add(entry)
        self._admit()
        if entry.started_s is None and (why := self._why_tenant_full(entry) or self._make_room(entry)):
            self._remove(entry)
            self._admit()  # later entries no longer wait for the removed one
            raise self._full(entry, why)
        return entry

    def leave(self, entry: Entry) -> None:
        """Remove a waiting or running request, and admit the requests that may run now. Idempotent."""
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
        """Return True if enough slots are free. If no request runs, always True, even for more choices than slots."""
        return not self._num_taken or self._num_taken + entry.num_slots <= self._limit

    def _may_run(self, entry: Entry) -> bool:
        """Return True if the tenant's limit allows the request to run. If none of the tenant's requests runs, always
        True."""
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
        """Return the reason why the tenant has too many requests or tokens waiting, including this entry; empty if it
        has not."""
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
        """Refuse other entries, as selected by the policy, until the queue has room for this one, and return an empty
        string. If that is not possible, change nothing and return the reason."""
        displaced: list[Entry] = []
        while why := self._why_full(entry):
            last = self._queue.last(entry)
            if (last.tenant.name, last.priority) == (entry.tenant.name, entry.priority):
                for each in displaced:  # requests of one tenant and class do not displace each other
                    self._add(each)
                return why
            self._remove(last)
            displaced.append(last)
        for each in displaced:
            each.refuse(self._full(each, "the queue is full, and a request with a better claim got this place in it"))
        return ""

    def _why_full(self, entry: Entry) -> str:
        """Return the reason why the queue is too full, including this entry; empty if it is not."""
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
        """Return the error for an entry that finds no room in the queue. Its retry delay is the predicted wait in the
        queue."""
        return _refusal(why, self._wait_s(entry, _GUESSED_HOLD_S if self._hold_s is None else self._hold_s))

    def _wait_s(self, entry: Entry, hold_s: float | None) -> float:
        """Return the predicted seconds until an entry that is not in the queue yet would run.

        Includes the wait for slots and for the tenant's limit. If it is unknown how fast slots become free, each
        request is assumed to hold its slots for `hold_s` seconds.
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
