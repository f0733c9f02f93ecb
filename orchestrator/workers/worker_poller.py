"""Polls the status of all workers, less often while they are idle, and detects leaked slots and jobs.

A slot or job is known if a request of this orchestrator owns it, or if it belongs to a stream that is kept for a client
to resume. A slot or job that has been unknown for 2 s is leaked. A slot may be leased without being used, for example
if the answer to a Reserve call was lost. Such a slot is leaked only when it has been unknown for 2 s plus the TTL of a
lease.

Run by `orchestrator.composition`; read by `orchestrator.observability.state`. Runs on the event loop.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from baton.calls.cluster_state import GenerationStatus, GroupState, PrefillStatus, StepSample
from baton.errors import BatonError, StaleTermError
from baton.planning.step_cost import LearntCosts
from baton.process.backoff import Backoff
from baton.process.clock import Clock
from baton.process.endless import repeat
from baton.types import Epoch
from orchestrator.membership.members import Membership
from orchestrator.membership.view import GenerationGroup, Group, PrefillGroup
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.workers.client import Clients
from orchestrator.workers.messages import step_costs_from_proto

logger = logging.getLogger(__name__)

LEAK_S = 2.0
"""Seconds after which a slot or job without a known request counts as leaked. Until then it is assumed to be about to
be freed."""
QUIET_S = 2.0
"""Seconds between two polls of workers that are idle and get no work."""
_TIMEOUT_S = 1.0
FRESH_S = 0.25
"""Seconds for which `refresh` reuses the workers' last answers instead of polling again."""
_MOST_PAUSE_S = 5.0
"""Maximum pause in seconds before the workers are polled again after an unexpected failure."""


class Leaks:
    """Detects leaked slots or jobs of one worker. A slot or job is leaked when it has been without a known request for
    `LEAK_S` seconds. For a slot that is leased but not in use, the limit is `LEAK_S` seconds plus the TTL of a lease.
    Does no I/O."""

    def __init__(self, lease_ttl_s: float) -> None:
        self._window_s = LEAK_S + lease_ttl_s
        self._seen: deque[tuple[float, int, int]] = deque()
        """Recent observations, one per poll. Each has three values: the time in seconds, the number of slots or jobs
        without a known request, and the second value minus the number of slots that are leased but not in use."""

    def observe(self, now_s: float, num_unknown: int, num_leased: int = 0) -> None:
        """Record the numbers that a poll returned at time `now_s`. `num_unknown` is the number of slots or jobs without
        a known request. `num_leased` is the number of slots that are leased but not in use, with or without a known
        request."""
        self._seen.append((now_s, num_unknown, num_unknown - num_leased))
        while len(self._seen) > 1 and self._seen[1][0] <= now_s - self._window_s:
            self._seen.popleft()  # the oldest one kept covers the window, if any does

    @property
    def num_leaked(self) -> int:
        """Return the number of leaked slots or jobs, i.e. of those without a known request for too long."""
        unknown = [(at_s, num_unknown) for at_s, num_unknown, _ in self._seen]
        beyond_leases = [(at_s, num_beyond) for at_s, _, num_beyond in self._seen]
        return max(_least(unknown, self._window_s), _least(beyond_leases, LEAK_S))


def _least(seen: list[tuple[float, int]], window_s: float) -> int:
    """Return the minimum number within the last `window_s` seconds; 0 if the observations do not cover that time."""
    begins = [index for index, (at_s, _) in enumerate(seen) if at_s <= seen[-1][0] - window_s]
    return max(0, min(num for _, num in seen[begins[-1] :])) if begins else 0


class WorkerPoller:
    """Polls the workers of all present groups. Holds their latest statuses and the numbers of leaked slots and jobs."""

    def __init__(
        self,
        members: Membership,
        clients: Clients,
        clock: Clock,
        on_step: Callable[[StepSample, LearntCosts | None], None] = lambda step, costs: None,
        *,
        lease_ttl_s: float = OrchestratorConfig.lease_ttl_s,
    ) -> None:
        """Create a poller. When a poll shows that a generation group has made new steps, `on_step` is called with the
        last of these steps, and the costs that the group reported at the poll before."""
        self._members = members
        self._clients = clients
        self._clock = clock
        self._lease_ttl_s = lease_ttl_s
        self._leaks: dict[str, Leaks] = {}
        """Leaked slots or jobs of each worker, by endpoint."""
        self._generation: dict[str, GenerationStatus] = {}
        """Latest status of each generation group, by endpoint. Groups that did not answer the last poll have no
        entry."""
        self._ranks: dict[str, PrefillStatus] = {}
        """Latest status of each prefill rank, by endpoint. Ranks that did not answer the last poll have no entry."""
        self.is_superseded = False
        """True if a worker has refused a call, because another orchestrator has replaced this one."""
        self._on_step = on_step
        self._leaks_count_from_s = clock.now_s() + lease_ttl_s
        self._refreshing = asyncio.Lock()
        """Lock that is held while `refresh` polls, so that concurrent callers of `refresh` share one poll."""
        self._answered: tuple[frozenset[str], float] = frozenset(), -FRESH_S
        """Endpoints that the last `refresh` polled, and the time in seconds at which all of them had answered."""
        self._asked: tuple[frozenset[str], float] = frozenset(), -QUIET_S
        """Endpoints of the last poll, and the time in seconds at which it began."""

    async def run(self, period_s: float) -> None:
        """Poll the workers every `period_s` seconds until this task is cancelled. Idle workers are polled less often
        (see `look`). Unexpected failures are logged, and polling continues."""

        async def look() -> None:
            await self.look()
            await asyncio.sleep(period_s)

        await repeat("polling the workers", look, Backoff(period_s, _MOST_PAUSE_S))

    async def look(self) -> None:
        """Poll every worker. Does nothing if the workers are idle and were polled within the last `QUIET_S` seconds."""
        if not self._is_quiet:
            await self.ask()

    async def ask(self) -> None:
        """Poll every worker once, and delete the data of workers that no longer exist. Takes at most about a second.
        Several calls may run at the same time."""
        view = self._members.present
        self._asked = view.endpoints, self._clock.now_s()
        await asyncio.gather(
            *(self._ask_generation(group) for group in view.generation),
            *(self._ask_rank(group, endpoint) for group in view.prefill for endpoint in group.endpoints),
        )
        present = self._members.present.endpoints  # workers may have been added or polled meanwhile
        for endpoint in (self._leaks.keys() | self._generation.keys() | self._ranks.keys()) - present:
            self._forget(endpoint)
        names = {group.name for group in self._members.present.generation}
        for reported in (self._members.num_bytes_free, self._members.step_costs):
            for name in reported.keys() - names:
                del reported[name]
        await self._clients.prune(present)

    async def refresh(self) -> None:
        """Poll every worker, unless `refresh` has polled the same workers within the last 0.25 s. Concurrent calls
        share one poll."""
        async with self._refreshing:
            answered, answered_s = self._answered
            endpoints = self._members.present.endpoints
            if answered != endpoints or self._clock.now_s() - answered_s >= FRESH_S:
                await self.ask()
                self._answered = endpoints, self._clock.now_s()

    @property
    def leaks_count(self) -> bool:
        """Return True if slots without a known request are reported as leaked. Return False during the first
        `lease_ttl_s` seconds of this object, because leases of an earlier orchestrator may still exist."""
        return self._clock.now_s() > self._leaks_count_from_s

    def groups(self) -> tuple[GroupState, ...]:
        """Return the states of all groups, based on the last answers of their workers."""
        return tuple(self._state(group) for group in self._members.present.groups)

    def group(self, name: str) -> GroupState | None:
        """Return the state of the group with this name; None if the group does not exist."""
        return next((group for group in self.groups() if group.name == name), None)

    @property
    def _is_quiet(self) -> bool:
        endpoints, asked_s = self._asked
        if self._members.has_work or self._clock.now_s() - asked_s >= QUIET_S:
            return False
        idle = {each for each, status in self._generation.items() if status.num_free == status.num_slots}
        idle |= {each for each, status in self._ranks.items() if not status.num_jobs}
        return endpoints == self._members.present.endpoints == idle

    async def _ask_generation(self, group: GenerationGroup) -> None:
        try:
            with self._clients.use(group.endpoint) as worker:
                status = await worker.generation_status(_TIMEOUT_S)
            learnt = step_costs_from_proto(status.step_costs) if status.HasField("step_costs") else None
        except BatonError as error:
            self._unanswered(group.endpoint, error)
            self._members.num_bytes_free.pop(group.name, None)
            self._members.step_costs.pop(group.name, None)
            return
        num_kept = sum(each.num_slots for each in status.kept)
        status.ClearField("kept")  # has request ids, and all tenants may see the status
        before = self._generation.get(group.endpoint)
        if status.HasField("last_step") and before is not None and status.num_steps != before.num_steps:
            self._on_step(status.last_step, self._members.step_costs.get(group.name))
        self._generation[group.endpoint] = status
        if status.kv.num_bytes:
            self._members.num_bytes_free[group.name] = status.kv.num_bytes_free
        if learnt is not None:
            self._members.step_costs[group.name] = learnt
        known = self._members.load(group.name).num_slots + num_kept
        self._observe(group.endpoint, status.num_slots - status.num_free - known, status.num_leased)

    async def _ask_rank(self, group: PrefillGroup, endpoint: str) -> None:
        try:
            with self._clients.use(endpoint) as worker:
                status = await worker.prefill_status(_TIMEOUT_S)
        except BatonError as error:
            self._unanswered(endpoint, error)
            return
        self._ranks[endpoint] = status
        self._observe(endpoint, status.num_jobs - self._members.load(group.name).num_requests)

    def _observe(self, endpoint: str, num_unknown: int, num_leased: int = 0) -> None:
        leaks = self._leaks.setdefault(endpoint, Leaks(self._lease_ttl_s))
        leaks.observe(self._clock.now_s(), num_unknown, num_leased)

    def _unanswered(self, endpoint: str, error: BatonError) -> None:
        logger.debug("%s does not say what it holds: %s", endpoint, error)
        if isinstance(error, StaleTermError) and not self.is_superseded:
            logger.error("not serving any more: %s", error)
            self.is_superseded = True
        self._forget(endpoint)  # also its leaks: the supervisor repairs it

    def _forget(self, endpoint: str) -> None:
        for known in (self._leaks, self._generation, self._ranks):
            known.pop(endpoint, None)

    def _state(self, group: Group) -> GroupState:
        if isinstance(group, PrefillGroup):
            role, endpoints, epoch, generation = "prefill", group.endpoints, group.epoch, None
        else:
            role, endpoints, epoch = "generate", (group.endpoint,), Epoch(0)
            generation = self._generation.get(group.endpoint)
        return GroupState(
            name=group.name,
            role=role,
            endpoints=endpoints,
            epoch=epoch,
            is_ready=self._members.may_have_work(group),
            num_leaked=max((self._leaks[each].num_leaked for each in endpoints if each in self._leaks), default=0),
            num_requests=self._members.load(group.name).num_requests,
            is_drained=self._members.is_drained(group),
            is_broken=self._members.is_broken(group),
            generation=generation,
            ranks={rank: self._ranks[each] for rank, each in enumerate(endpoints) if each in self._ranks},
            lender=self._members.orders.lender(group.name),
        )
