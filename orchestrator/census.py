"""What the workers hold, and what of it nobody here knows: the orchestrator's eye for leaks.

Leaked are slots or jobs that were held, without pause, for over 2 s by no request of this orchestrator, and not kept
for one to come back to. Asks all workers now and then, on the loop.
"""

import asyncio
import logging
from collections import deque

from baton.clock import Clock
from baton.errors import BatonError
from baton.results import GroupState
from orchestrator.clients import Clients, GenerationHoldings
from orchestrator.membership import GenerationGroup, Members, PrefillGroup

logger = logging.getLogger(__name__)

LEAK_S = 2.0
"""Seconds after which what nobody knows is leaked: until then it is on its way to be freed."""
_TIMEOUT_S = 1.0


class Excess:
    """How much of one worker's holdings was unknown, over the last LEAK_S seconds. Pure."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def observe(self, now_s: float, num_unknown: int) -> None:
        """So much was unknown now."""
        self._seen.append((now_s, num_unknown))
        while len(self._seen) > 1 and self._seen[1][0] <= now_s - LEAK_S:
            self._seen.popleft()  # the first one kept is LEAK_S old, or all there is

    def forget(self) -> None:
        """The worker did not answer: what it holds is its supervisor's business."""
        self._seen.clear()

    @property
    def num_leaked(self) -> int:
        """What was unknown all the time."""
        if not self._seen or self._seen[-1][0] - self._seen[0][0] < LEAK_S:
            return 0
        return max(0, min(unknown for _, unknown in self._seen))


class Census:
    """Holdings and leaks of all groups in the view."""

    def __init__(self, members: Members, clients: Clients, clock: Clock) -> None:
        self._members = members
        self._clients = clients
        self._clock = clock
        self._excess: dict[str, Excess] = {}
        """By endpoint."""
        self._holdings: dict[str, GenerationHoldings] = {}

    async def run(self, period_s: float) -> None:
        """Asks again and again, until it is cancelled."""
        while True:
            await self.ask()
            await asyncio.sleep(period_s)

    async def ask(self) -> None:
        """Asks every worker of the view once; at most a second. Lets go of workers that are no longer in it."""
        view = self._members.view
        await asyncio.gather(
            *(self._ask_generation(group) for group in view.generation),
            *(self._ask_rank(group, endpoint) for group in view.prefill for endpoint in group.endpoints),
        )
        for endpoint in self._excess.keys() - view.endpoints:
            del self._excess[endpoint]
            self._holdings.pop(endpoint, None)
        await self._clients.prune(view.endpoints)

    def groups(self) -> tuple[GroupState, ...]:
        """All groups of the view, as they were when last asked."""
        view = self._members.view
        return (
            *(self._prefill_state(group) for group in view.prefill),
            *(self._generation_state(group) for group in view.generation),
        )

    async def _ask_generation(self, group: GenerationGroup) -> None:
        excess = self._excess.setdefault(group.endpoint, Excess())
        try:
            with self._clients.use(group.endpoint) as worker:
                held = await worker.generation_holdings(_TIMEOUT_S)
        except BatonError as error:
            self._unanswered(group.endpoint, error)
            return
        self._holdings[group.endpoint] = held
        known = self._members.load(group.name).num_slots + held.num_kept
        excess.observe(self._clock.now_s(), held.num_slots - held.num_free - known)

    async def _ask_rank(self, group: PrefillGroup, endpoint: str) -> None:
        excess = self._excess.setdefault(endpoint, Excess())
        try:
            with self._clients.use(endpoint) as worker:
                num_jobs = await worker.num_jobs(_TIMEOUT_S)
        except BatonError as error:
            self._unanswered(endpoint, error)
            return
        excess.observe(self._clock.now_s(), num_jobs - self._members.load(group.name).num_requests)

    def _unanswered(self, endpoint: str, error: BatonError) -> None:
        logger.debug("%s does not say what it holds: %s", endpoint, error)
        self._excess[endpoint].forget()
        self._holdings.pop(endpoint, None)

    def _num_leaked(self, endpoint: str) -> int:
        excess = self._excess.get(endpoint)
        return 0 if excess is None else excess.num_leaked

    def _prefill_state(self, group: PrefillGroup) -> GroupState:
        return GroupState(
            name=group.name,
            role="prefill",
            endpoints=group.endpoints,
            epoch=group.epoch,
            is_ready=group.ready,
            num_slots=0,
            num_free=0,
            num_bytes_held=0,
            num_leaked=max((self._num_leaked(endpoint) for endpoint in group.endpoints), default=0),
            num_requests=self._members.load(group.name).num_requests,
        )

    def _generation_state(self, group: GenerationGroup) -> GroupState:
        held = self._holdings.get(group.endpoint, GenerationHoldings(group.num_slots, 0, 0))
        return GroupState(
            name=group.name,
            role="generate",
            endpoints=(group.endpoint,),
            epoch=0,
            is_ready=group.ready,
            num_slots=held.num_slots,
            num_free=held.num_free,
            num_bytes_held=held.num_bytes,
            num_leaked=self._num_leaked(group.endpoint),
            num_requests=self._members.load(group.name).num_requests,
        )
