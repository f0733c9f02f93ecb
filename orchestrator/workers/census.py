"""Asks all workers what they hold, and finds leaks and books that do not balance.

A leak is a slot or job that for over 2 s without pause belonged to no request of this orchestrator, and to no stream
kept for a client to resume. A slot that is only leased ends by its ttl if its lease was of a Reserve whose answer was
lost: it counts as a leak when it has not ended by then. Run by `orchestrator.controller`; read by
`orchestrator.observability.state`; calls workers through `orchestrator.workers.client`. On the loop.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from baton.clock import Clock
from baton.endless import Pauses, repeat
from baton.errors import BatonError
from baton.results import GroupState, PrefixHoldings
from orchestrator.membership.members import Members
from orchestrator.membership.view import GenerationGroup, PrefillGroup
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.workers.client import Clients, GenerationHoldings, StepSample

logger = logging.getLogger(__name__)

LEAK_S = 2.0
"""Seconds after which a slot or job of no known request is a leak: until then it may be on its way to be freed."""
_TIMEOUT_S = 1.0
_MOST_PAUSE_S = 5.0
"""Longest pause in seconds after an unforeseen failure, until the workers are asked again."""


class Excess:
    """How much of one worker's holdings was unknown over the last `window_s` seconds. Pure."""

    def __init__(self, window_s: float = LEAK_S) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, int]] = deque()

    def observe(self, now_s: float, num_unknown: int) -> None:
        """Record how many slots or jobs of the worker belong to no known request now."""
        self._seen.append((now_s, num_unknown))
        while len(self._seen) > 1 and self._seen[1][0] <= now_s - self._window_s:
            self._seen.popleft()  # the oldest one kept spans the window, if any does

    def forget(self) -> None:
        """Forget all observations, because the worker did not answer: its supervisor deals with what it holds."""
        self._seen.clear()

    @property
    def num_leaked(self) -> int:
        """Return how many slots or jobs were unknown during the whole window; 0 until the window is full."""
        if not self._seen or self._seen[-1][0] - self._seen[0][0] < self._window_s:
            return 0
        return max(0, min(unknown for _, unknown in self._seen))


class Leaks:
    """Leaks of one worker: slots or jobs that are unknown for LEAK_S seconds, slots that may be merely leased for a
    lease's ttl longer. Pure."""

    def __init__(self, lease_ttl_s: float) -> None:
        self._beyond_leases = Excess()
        self._all = Excess(LEAK_S + lease_ttl_s)

    def observe(self, now_s: float, num_unknown: int, num_leased: int = 0) -> None:
        """Record how many slots or jobs belong to no known request now, and how many slots, known or not, are merely
        leased."""
        self._beyond_leases.observe(now_s, num_unknown - num_leased)
        self._all.observe(now_s, num_unknown)

    def forget(self) -> None:
        """Forget all observations, because the worker did not answer: its supervisor deals with what it holds."""
        self._beyond_leases.forget()
        self._all.forget()

    @property
    def num_leaked(self) -> int:
        """Return the number of leaked slots or jobs."""
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
        """`on_step` is called with forward passes of generation groups, at most once for each. `lease_ttl_s` is the
        leases' ttl."""
        self._members = members
        self._clients = clients
        self._clock = clock
        self._lease_ttl_s = lease_ttl_s
        self._leaks: dict[str, Leaks] = {}
        """Leaks of each worker, by endpoint."""
        self._holdings: dict[str, GenerationHoldings] = {}
        self._prefixes: dict[str, PrefixHoldings] = {}
        """Holdings of the prefix stores of ranks' nodes, by a rank's endpoint."""
        self._on_step = on_step

    async def run(self, period_s: float) -> None:
        """Ask all workers every `period_s` seconds until this task is cancelled, also after an unforeseen failure."""

        async def ask() -> None:
            await self.ask()
            await asyncio.sleep(period_s)

        await repeat("the census of workers", ask, Pauses(period_s, _MOST_PAUSE_S))

    async def ask(self) -> None:
        """Ask every worker once, which takes at most a second, and forget workers that are no longer present.

        May be called while another call waits for answers.
        """
        view = self._members.present
        await asyncio.gather(
            *(self._ask_generation(group) for group in view.generation),
            *(self._ask_rank(group, endpoint) for group in view.prefill for endpoint in group.endpoints),
        )
        present = self._members.present.endpoints  # other workers may have come, or been asked, meanwhile
        for endpoint in (self._leaks.keys() | self._holdings.keys() | self._prefixes.keys()) - present:
            self._leaks.pop(endpoint, None)
            self._holdings.pop(endpoint, None)
            self._prefixes.pop(endpoint, None)
        await self._clients.prune(present)

    def groups(self) -> tuple[GroupState, ...]:
        """Return the states of all groups, as their workers answered last."""
        view = self._members.present
        return (
            *(self._prefill_state(group) for group in view.prefill),
            *(self._generation_state(group) for group in view.generation),
        )

    def group(self, name: str) -> GroupState | None:
        """Return the state of the group of that name; None when there is none."""
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
    """Return, for people, why the group's own books or its reported slots do not balance; empty when all do."""
    num_taken = held.num_leased + held.num_active + held.num_quarantined
    if held.imbalance:
        return held.imbalance
    if held.num_free + num_taken != held.num_slots:
        return f"{held.num_free} slots free and {num_taken} taken are not the {held.num_slots} that there are"
    return held.kv.imbalance
