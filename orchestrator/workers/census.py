"""What the workers hold, and what of it nobody here knows: the orchestrator's eye for leaks, and for books that do not
balance.

Leaked are slots or jobs that were held, without pause, for over 2 s by no request of this orchestrator, and not kept
for one to come back to. A slot that is only leased ends by its ttl, when its lease was of a Reserve whose answer was
lost: it counts as leaked when it has not ended by then. Asks all workers now and then, on the loop.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from baton.clock import Clock
from baton.endless import Pauses, repeat
from baton.errors import BatonError
from baton.results import GroupState, PrefixHoldings
from orchestrator.membership.members import GenerationGroup, Members, PrefillGroup
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.workers.client import Clients, GenerationHoldings, StepSample

logger = logging.getLogger(__name__)

LEAK_S = 2.0
"""Seconds after which what nobody knows is leaked: until then it is on its way to be freed."""
_TIMEOUT_S = 1.0
_MOST_PAUSE_S = 5.0
"""After failures that were not foreseen, until the workers are asked again."""


class Excess:
    """How much of one worker's holdings was unknown, over the last LEAK_S seconds, or another time. Pure."""

    def __init__(self, window_s: float = LEAK_S) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, int]] = deque()

    def observe(self, now_s: float, num_unknown: int) -> None:
        """So much was unknown now."""
        self._seen.append((now_s, num_unknown))
        while len(self._seen) > 1 and self._seen[1][0] <= now_s - self._window_s:
            self._seen.popleft()  # the first one kept is as old as the window, or all there is

    def forget(self) -> None:
        """The worker did not answer: what it holds is its supervisor's business."""
        self._seen.clear()

    @property
    def num_leaked(self) -> int:
        """What was unknown all the time."""
        if not self._seen or self._seen[-1][0] - self._seen[0][0] < self._window_s:
            return 0
        return max(0, min(unknown for _, unknown in self._seen))


class Leaks:
    """What of one worker's holdings is leaked: for sure after LEAK_S seconds; what may be no more than leases, when
    their ttl is over, too. Pure."""

    def __init__(self, lease_ttl_s: float) -> None:
        self._beyond_leases = Excess()
        self._all = Excess(LEAK_S + lease_ttl_s)

    def observe(self, now_s: float, num_unknown: int, num_leased: int = 0) -> None:
        """So much was unknown now; so many slots were leased, and not active yet, whether known or not."""
        self._beyond_leases.observe(now_s, num_unknown - num_leased)
        self._all.observe(now_s, num_unknown)

    def forget(self) -> None:
        """The worker did not answer: what it holds is its supervisor's business."""
        self._beyond_leases.forget()
        self._all.forget()

    @property
    def num_leaked(self) -> int:
        """Slots or jobs."""
        return max(self._beyond_leases.num_leaked, self._all.num_leaked)


class Census:
    """Holdings and leaks of all groups that are present."""

    def __init__(
        self,
        members: Members,
        clients: Clients,
        clock: Clock,
        on_step: Callable[[StepSample], None] = lambda step: None,
        *,
        lease_ttl_s: float = OrchestratorConfig.lease_ttl_s,
    ) -> None:
        """`on_step` hears of forwards of generation groups, no two times of the same. `lease_ttl_s`: of leases."""
        self._members = members
        self._clients = clients
        self._clock = clock
        self._lease_ttl_s = lease_ttl_s
        self._leaks: dict[str, Leaks] = {}
        """By endpoint."""
        self._holdings: dict[str, GenerationHoldings] = {}
        self._prefixes: dict[str, PrefixHoldings] = {}
        """By a rank's endpoint, those of its node."""
        self._on_step = on_step

    async def run(self, period_s: float) -> None:
        """Ask again and again until this task is cancelled, also after a failure that was not foreseen."""

        async def ask() -> None:
            await self.ask()
            await asyncio.sleep(period_s)

        await repeat("the census of workers", ask, Pauses(period_s, _MOST_PAUSE_S))

    async def ask(self) -> None:
        """Asks every worker once; at most a second. Lets go of workers that are no longer present. May be called while
        another call waits for answers."""
        view = self._members.present
        await asyncio.gather(
            *(self._ask_generation(group) for group in view.generation),
            *(self._ask_rank(group, endpoint) for group in view.prefill for endpoint in group.endpoints),
        )
        present = self._members.present.endpoints  # others may have come, and others asked, meanwhile
        for endpoint in (self._leaks.keys() | self._holdings.keys() | self._prefixes.keys()) - present:
            self._leaks.pop(endpoint, None)
            self._holdings.pop(endpoint, None)
            self._prefixes.pop(endpoint, None)
        await self._clients.prune(present)

    def groups(self) -> tuple[GroupState, ...]:
        """All groups, as they were when last asked."""
        view = self._members.present
        return (
            *(self._prefill_state(group) for group in view.prefill),
            *(self._generation_state(group) for group in view.generation),
        )

    def group(self, name: str) -> GroupState | None:
        """The group of that name; None when there is none."""
        return next((group for group in self.groups() if group.name == name), None)

    async def _ask_generation(self, group: GenerationGroup) -> None:
        leaks = self._leaks_of(group.endpoint)
        try:
            with self._clients.use(group.endpoint) as worker:
                held = await worker.generation_holdings(_TIMEOUT_S)
        except BatonError as error:
            self._unanswered(group.endpoint, leaks, error)
            self._members.memory.pop(group.name, None)
            return
        before = self._holdings.get(group.endpoint)
        if held.step is not None and before is not None and held.num_steps != before.num_steps:
            self._on_step(held.step)
        self._holdings[group.endpoint] = held
        self._members.memory[group.name] = held.kv
        known = self._members.load(group.name).num_slots + held.num_kept
        leaks.observe(self._clock.now_s(), held.num_slots - held.num_free - known, held.num_leased)

    async def _ask_rank(self, group: PrefillGroup, endpoint: str) -> None:
        leaks = self._leaks_of(endpoint)
        try:
            with self._clients.use(endpoint) as worker:
                held = await worker.prefill_holdings(_TIMEOUT_S)
        except BatonError as error:
            self._unanswered(endpoint, leaks, error)
            return
        self._prefixes[endpoint] = held.prefixes
        leaks.observe(self._clock.now_s(), held.num_jobs - self._members.load(group.name).num_requests)

    def _leaks_of(self, endpoint: str) -> Leaks:
        return self._leaks.setdefault(endpoint, Leaks(self._lease_ttl_s))

    def _unanswered(self, endpoint: str, leaks: Leaks, error: BatonError) -> None:
        logger.debug("%s does not say what it holds: %s", endpoint, error)
        leaks.forget()
        self._holdings.pop(endpoint, None)
        self._prefixes.pop(endpoint, None)

    def _num_leaked(self, endpoint: str) -> int:
        leaks = self._leaks.get(endpoint)
        return 0 if leaks is None else leaks.num_leaked

    def _prefill_state(self, group: PrefillGroup) -> GroupState:
        return GroupState(
            name=group.name,
            role="prefill",
            endpoints=group.endpoints,
            epoch=group.epoch,
            is_ready=self._members.may_have_work(group),
            num_slots=0,
            num_free=0,
            num_bytes_held=0,
            num_leaked=max((self._num_leaked(endpoint) for endpoint in group.endpoints), default=0),
            num_requests=self._members.load(group.name).num_requests,
            is_drained=self._members.is_drained(group),
            is_broken=self._members.is_broken(group),
            prefixes=next(
                (self._prefixes[each] for each in group.endpoints if each in self._prefixes), PrefixHoldings()
            ),
            processors=group.processors,
        )

    def _generation_state(self, group: GenerationGroup) -> GroupState:
        asked = self._holdings.get(group.endpoint)
        held = asked or GenerationHoldings(group.num_slots, 0, 0)
        return GroupState(
            name=group.name,
            role="generate",
            endpoints=(group.endpoint,),
            epoch=0,
            is_ready=self._members.may_have_work(group),
            num_slots=held.num_slots,
            num_free=held.num_free,
            num_bytes_held=held.num_bytes,
            num_leaked=self._num_leaked(group.endpoint),
            num_requests=self._members.load(group.name).num_requests,
            num_leased=held.num_leased,
            num_active=held.num_active,
            num_quarantined=held.num_quarantined,
            kv=held.kv,
            num_preemptions=held.num_preemptions,
            imbalance="" if asked is None else imbalance(asked),
            prefixes=held.prefixes,
            is_drained=self._members.is_drained(group),
            is_broken=self._members.is_broken(group),
            residency=group.residency,
            is_approximate=group.is_approximate,
            processors=group.processors,
        )


def imbalance(held: GenerationHoldings) -> str:
    """What does not balance, for people: in the group's own books, or in what it says it holds; empty when all does."""
    num_taken = held.num_leased + held.num_active + held.num_quarantined
    if held.imbalance:
        return held.imbalance
    if held.num_free + num_taken != held.num_slots:
        return f"{held.num_free} slots free and {num_taken} taken are not the {held.num_slots} that there are"
    return held.kv.imbalance
