"""Open-loop load: sends requests at random times, and records their outcomes.

The load calls a scheduler in this process, on its event loop. The measured time until a refusal therefore contains no
time for a network. Arrivals do not wait for earlier answers, so a slow server receives as many requests as a fast one.
"""

import asyncio
import contextlib
import math
import random
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.errors import BatonError, DeadlineExceededError, ResourceExhaustedError
from baton.process.clock import SystemClock
from baton.sampling_params import SamplingParams
from baton.types import RequestId, TokenEvent
from benchmarks.support.harness import random_prompt
from orchestrator.requests.record import Event, Finished
from orchestrator.requests.request import Request
from orchestrator.requests.tenants import DEFAULT_TENANT, Tenant
from orchestrator.scheduler import RequestScheduler

_NUM_PROMPTS = 64


@dataclass(frozen=True)
class Ask:
    """Parameters that all requests of a load have in common."""

    num_tokens: int
    """Number of prompt tokens."""
    max_tokens: int
    deadline_s: float | None = None
    """Seconds from the request's arrival until its deadline; None: no deadline."""
    tenant: Tenant = DEFAULT_TENANT


@dataclass(frozen=True)
class Fate:
    """Outcome of one request. Times are in seconds from the start of the load."""

    at_s: float
    """Arrival time of the request."""
    end_s: float
    first_s: float | None
    """Time at which the first token of the request arrived. None if no token arrived."""
    refused: bool
    """True if the request was refused, either on arrival or later, when another request replaced it in the queue."""
    in_time: bool
    """True if the request received all requested tokens, within its deadline if it has one."""

    @property
    def ttft_s(self) -> float:
        """Time from the request's arrival to its first token, in seconds. Infinite if no token arrived."""
        return math.inf if self.first_s is None else self.first_s - self.at_s


class Source:
    """Sends requests with the same parameters and different prompts to a scheduler, and records their outcomes."""

    def __init__(self, scheduler: RequestScheduler, seed: int) -> None:
        self._scheduler = scheduler
        self._clock = SystemClock()
        self._seed = seed
        self._prompts: dict[int, list[tuple[int, ...]]] = {}
        self._num_asked = 0

    async def one(self, ask: Ask, start_s: float) -> Fate:
        """Send one request and return its outcome. `start_s` is the start of the load. A refusal and an exceeded
        deadline are outcomes; all other errors are raised."""
        clock = self._clock
        at_s, first_s, error = clock.now_s() - start_s, None, None
        try:
            async with contextlib.aclosing(self._scheduler.generate(self._spec(ask))) as events:
                async for event in events:
                    if first_s is None and isinstance(event, TokenEvent) and event.token is not None:
                        first_s = clock.now_s() - start_s
                    error = _error_of(event)
        except ResourceExhaustedError as refusal:
            error = refusal
        end_s = clock.now_s() - start_s
        if error is not None and not isinstance(error, ResourceExhaustedError | DeadlineExceededError):
            raise error
        return Fate(at_s, end_s, first_s, isinstance(error, ResourceExhaustedError), error is None)

    async def at_once(self, ask: Ask, num_streams: int, seconds: float) -> list[Fate]:
        """Run `num_streams` streams for `seconds` seconds, and return the outcomes of all requests. Each stream sends
        its next request when its previous one has ended. Used to measure the server's capacity."""
        start_s = self._clock.now_s()

        async def stream() -> list[Fate]:
            fates = []
            while self._clock.now_s() - start_s < seconds:
                fates.append(await self.one(ask, start_s))
            return fates

        return [fate for fates in await asyncio.gather(*(stream() for _ in range(num_streams))) for fate in fates]

    async def at_rate(self, ask: Ask, rate: float, seconds: float) -> list[Fate]:
        """Send requests at random times for `seconds` seconds, on average `rate` per second. When all have ended,
        return their outcomes."""
        start_s, tasks = self._clock.now_s(), []
        self._seed += 1
        for at_s in arrival_times(rate, seconds, self._seed):
            await asyncio.sleep(max(0.0, start_s + at_s - self._clock.now_s()))
            tasks.append(asyncio.create_task(self.one(ask, start_s)))
        return list(await asyncio.gather(*tasks))

    def _spec(self, ask: Ask) -> Request:
        prompts = self._prompts.setdefault(ask.num_tokens, [])
        if len(prompts) < _NUM_PROMPTS:
            prompts.append(random_prompt(ask.num_tokens, len(prompts)))
        self._num_asked += 1
        return Request(
            RequestId(uuid.uuid4().hex),
            prompts[self._num_asked % len(prompts)],
            SamplingParams(max_tokens=ask.max_tokens, ignore_eos=True),
            deadline_s=None if ask.deadline_s is None else self._clock.now_s() + ask.deadline_s,
            tenant=ask.tenant,
        )


def arrival_times(rate: float, seconds: float, seed: int) -> Iterator[float]:
    """Yield the arrival times of a Poisson process with `rate` arrivals per second, in ascending order. Times are in
    seconds from the start, and end at `seconds`. The same seed gives the same times."""
    rng, at_s = random.Random(seed), 0.0
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        yield at_s


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile: the smallest value that is at least as large as `percent` percent of the values. NaN if
    `values` is empty."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def throughput(fates: Sequence[Fate], from_s: float, to_s: float) -> float:
    """Return the number of requests per second that were completed, with all requested tokens, between `from_s` and
    `to_s`. Both are in seconds from the start of the load."""
    return sum(fate.in_time and from_s < fate.end_s <= to_s for fate in fates) / (to_s - from_s)


def _error_of(event: Event) -> BatonError | None:
    return event.error if isinstance(event, Finished) else None
