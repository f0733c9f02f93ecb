"""Load of continuously running streams and of prompts that arrive in the meantime. Measures the streams' times between
tokens, and the prompts' times to first token.

Calls a scheduler in this process, on its event loop. The engine that generates a token records the token's time.
"""

import asyncio
import contextlib
import math
import random
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from baton.planning.planner import ChainPlanner
from baton.process.clock import SystemClock
from baton.results.timings import Timings
from baton.sampling_params import SamplingParams
from baton.types import RequestId, TokenEvent
from benchmarks.support.arrivals import Arrival
from benchmarks.support.harness import random_prompt
from benchmarks.support.open_loop import percentile
from deploy.groups.cluster import LocalCluster
from orchestrator.composition import build_orchestrator
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.record import Finished
from orchestrator.requests.request import Request
from orchestrator.scheduler import RequestScheduler

STREAM_TOKENS = 192
"""Number of prompt tokens of each running stream."""
_OUTPUT_TOKENS = 4000
"""Number of output tokens of a running stream. When a stream has generated all of them, a new stream replaces it."""
_FIRST_SEED = 1_000_000
"""Seed of the prompt of the first running stream. It is much larger than the seeds of other prompts, so that all
prompts differ."""


@dataclass(frozen=True)
class Asked:
    """Result of one prompt that was served."""

    num_tokens: int
    ttft_s: float
    reason: str
    """Scheduler's reason to prefill the prompt on a chain or on the generation engine."""


@dataclass
class Gaps:
    """Times at which the tokens of each running stream were generated, in nanoseconds since the Unix epoch."""

    token_ns: list[list[int]] = field(default_factory=list)
    """Times of tokens in nanoseconds since the Unix epoch, one list per stream."""

    def between_ms(self, start_ns: int, end_ns: int) -> list[float]:
        """Return the times between consecutive tokens of a stream in milliseconds, for all streams. Only tokens that
        were generated between `start_ns` and `end_ns` are included."""
        return [
            (after - before) / 1e6
            for times in self.token_ns
            for before, after in pairwise(times)
            if start_ns < after <= end_ns
        ]


def mixed(seed: int, num_short: int, num_long: int, seconds: float) -> tuple[Arrival, ...]:
    """Return the arrivals of short prompts (32 to 256 tokens) and of long ones (2,000 to 4,000) at random times within
    `seconds` seconds. The first prompt is a long one. The same seed gives the same arrivals."""
    rng = random.Random(seed)
    sizes = [rng.randint(32, 256) for _ in range(num_short)] + [rng.randint(2000, 4000) for _ in range(num_long)]
    times = [rng.uniform(0.0, seconds) for _ in sizes]
    times[-1] = 0.0
    first = seed * len(sizes)
    return tuple(sorted(Arrival(*each, first + index) for index, each in enumerate(zip(times, sizes, strict=True))))


async def ask(scheduler: RequestScheduler, arrival: Arrival) -> Asked:
    """Wait until the prompt's arrival time, send the prompt with a request for one token, and read its stream to the
    end. Return the result."""
    await asyncio.sleep(arrival.at_s)  # from the load's start
    clock, first_s, timings = SystemClock(), math.nan, None
    start_s = clock.now_s()
    spec = _spec(random_prompt(arrival.num_tokens, arrival.seed), 1)
    async with contextlib.aclosing(scheduler.generate(spec)) as events:
        async for event in events:
            if isinstance(event, TokenEvent) and event.token is not None:
                first_s = clock.now_s()
            elif isinstance(event, Finished):
                timings = _timings(event)
    assert timings is not None and timings.prefill.placement is not None, "a stream without an end"
    return Asked(arrival.num_tokens, first_s - start_s, timings.prefill.placement.reason)


@contextlib.asynccontextmanager
async def streaming(scheduler: RequestScheduler, num_streams: int) -> AsyncIterator[Gaps]:
    """Context manager. Keep `num_streams` streams running until exit, and yield the times of their tokens. The block
    starts when each stream has received its first token."""
    gaps, begun = Gaps(), asyncio.Semaphore(0)
    tasks = [asyncio.create_task(_run_on(scheduler, number, gaps, begun)) for number in range(num_streams)]
    try:
        for _ in tasks:
            await asyncio.wait_for(begun.acquire(), 120)
        yield gaps
        for task in tasks:
            assert not task.done(), task.exception()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run_on(scheduler: RequestScheduler, number: int, gaps: Gaps, begun: asyncio.Semaphore) -> None:
    """Run one stream after the other until cancelled."""
    is_first = True
    while True:
        times: list[int] = []
        gaps.token_ns.append(times)
        spec = _spec(random_prompt(STREAM_TOKENS, _FIRST_SEED + number), _OUTPUT_TOKENS)
        async with contextlib.aclosing(scheduler.generate(spec)) as events:
            async for event in events:
                if isinstance(event, TokenEvent) and event.token is not None:
                    times.append(event.unix_ns)
                    if is_first:
                        is_first = False
                        begun.release()
                elif isinstance(event, Finished):
                    _timings(event)


@contextlib.asynccontextmanager
async def controlled(
    cluster: LocalCluster, planner: ChainPlanner, config: OrchestratorConfig
) -> AsyncIterator[RequestScheduler]:
    """Context manager. Run an orchestrator's scheduler over a running local cluster, and yield it. The scheduler is
    closed on exit."""
    orchestrator = build_orchestrator(cluster.members, planner, SystemClock(), secret=cluster.secret, config=config)
    orchestrator.start()
    try:
        yield orchestrator.scheduler
    finally:
        await orchestrator.close()


def p99(values: Sequence[float]) -> float:
    """Return the 99th percentile; NaN if there are no values."""
    return percentile(values, 99)


def _spec(prompt: tuple[int, ...], max_tokens: int) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(RequestId(uuid.uuid4().hex), prompt, params)


def _timings(finished: Finished) -> Timings:
    if finished.error is not None:
        raise finished.error
    return finished.timings
