"""Benchmark of the server under overload, and with one tenant that requests far more than its fair share.

A local cluster runs an orchestrator, a prefill rank and a generation engine with one thread each. It receives requests
at random times, regardless of earlier answers (`benchmarks.support.open_loop`). The capacity in requests per second is
measured first, with streams that each send a new request when their previous request has ended. The limits apply to a
machine with at least as many cores as computing threads. With fewer cores, each thread slows down the others, and the
order in which requests are served has no effect on the results.

`trace=overload` sends three times as many requests as can be served. `BOUND_S` is the maximum time in seconds until an
admitted request should have its first token. There are two policies:

- `policy=queue`: the queue is limited to the number of requests that are served within `BOUND_S` seconds
- `policy=deadline`: the queue is long, and each request has a deadline of `BOUND_S` seconds. It requests one token, so
  a request is completed in time if its first token is in time

Its output rows are:

- p99 of the time until a refusal (baseline `promised`: 50 ms)
- p95 of the time to first token of requests that were not refused, as a multiple of `BOUND_S`
- requests completed in time, as a fraction of the capacity
- this process's memory at the end, as a multiple of its memory after a quarter of the time
- seconds from the last arrival to the last first token

`trace=fair` has two tenants. A light tenant sends a tenth of the load that can be served, first alone (baseline
`alone`), then together with a heavy tenant, which sends twenty times as much. `NUM_RESERVED` slots are never given to
the heavy tenant. If the light tenant occupies all of them while the heavy tenant occupies all other slots, the light
tenant's next request waits for a slot, even if it is first in the queue. Output row: p95 of the light tenant's time to
first token.

With `--bars`, the limits are, in the order of the rows: 50 ms; 1.3 times `BOUND_S`; 0.9 of the capacity; 1.05 times the
memory; 1.3 times `BOUND_S`; and for `trace=fair`, 1.5 times `alone`.
"""

import argparse
import asyncio
import contextlib
import math
import os
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from baton.planning.planner import ChainPlanner
from baton.process.clock import SystemClock
from benchmarks.support.harness import Bars, Pairs, Reporter, case, make_parser, progress, resolve
from benchmarks.support.local_config import local_config
from benchmarks.support.open_loop import Ask, Fate, Source, percentile, throughput
from deploy.groups.cluster import LocalCluster
from deploy.machine.cluster_plan import ClusterPlan
from deploy.machine.planners import served_planner
from deploy.machine.resolved_model import ResolvedModel
from orchestrator.composition import build_orchestrator
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.tenants import Tenant
from orchestrator.scheduler import RequestScheduler

FACTOR = 3.0
"""Request rate of `trace=overload`, as a multiple of the cluster's measured capacity (requests per second)."""
UNEQUAL = 20.0
"""Request rate of the heavy tenant, as a multiple of the light tenant's rate."""
LIGHT_PART = 0.1
"""Request rate of the light tenant, as a fraction of the cluster's measured capacity (requests per second)."""
BOUND_S = 3.0
"""Time in seconds within which a request that is not refused should receive its first token."""
NUM_SLOTS = 12
NUM_RESERVED = 4
"""Number of slots that are reserved for the light tenant."""
ROUNDS = 3
"""Number of rounds of `trace=fair`. In each round the light tenant runs alone, then together with the heavy tenant."""
REFUSAL_BAR_MS = 50.0
TTFT_BAR = 1.3
GOODPUT_BAR = 0.9
MEMORY_BAR = 1.05
FAIR_BAR = 1.5
_CASES = {"queue": Ask(128, 32), "deadline": Ask(256, 1, deadline_s=BOUND_S)}
_FAIR = "fair"
_QUICK_TOKENS, _QUICK_OUTPUT = 64, 4
_PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20


@dataclass(frozen=True)
class Times:
    """Durations of the measurements, in seconds."""

    capacity_s: float
    overload_s: float
    fair_s: float
    """Duration in seconds of each of the two runs in a round of `trace=fair`: light tenant alone, then both tenants."""
    num_rounds: int


FULL = Times(30.0, 120.0, 60.0, ROUNDS)
QUICK = Times(8.0, 8.0, 8.0, 1)


@dataclass(frozen=True)
class Overloaded:
    """Measurements of one run under overload."""

    fates: list[Fate]
    memory: tuple[float, float]
    """Resident memory of this process in MiB: (after a quarter of the run, at its end)."""

    @property
    def refusals_ms(self) -> list[float]:
        """Time from arrival to refusal of each refused request, in milliseconds."""
        return [(fate.end_s - fate.at_s) * 1000 for fate in self.fates if fate.refused]

    @property
    def ttfts_s(self) -> list[float]:
        """Times to first token of the requests that were not refused, in seconds."""
        return [fate.ttft_s for fate in self.fates if not fate.refused]

    @property
    def recovery_s(self) -> float:
        """Seconds from the last request's arrival until the last first token was received."""
        first_s = [fate.first_s for fate in self.fates if fate.first_s is not None]
        return max(0.0, max(first_s) - max(fate.at_s for fate in self.fates))


class _Bench:
    """Local cluster that serves all cases, the options, and the measurements."""

    def __init__(self, args: argparse.Namespace, cluster: LocalCluster, planner: ChainPlanner) -> None:
        self._times = QUICK if args.quick else FULL
        self._cases = {policy: _shorter(ask) if args.quick else ask for policy, ask in _CASES.items()}
        self._wanted = args.cases.split(",")
        self._cluster, self._planner = cluster, planner
        self._reporter, self._bars = Reporter("overload", args.json), Bars()
        self._console = Console(stderr=True, highlight=False)

    async def run(self) -> Bars:
        """Measure all requested cases. Return the limits (bars) and whether the measured values meet them."""
        for policy, ask in self._cases.items():
            if policy not in self._wanted:
                continue
            capacity = await self._capacity(ask)
            self._console.print(f"  {policy}: {capacity:.2f} requests/s can be served", markup=False)
            self._report_overload(policy, ask, capacity, await self._overload(ask, capacity))
        if _FAIR in self._wanted:
            await self._fairness(self._cases["queue"])
        self._reporter.close()
        return self._bars

    async def _capacity(self, ask: Ask) -> float:
        seconds = self._times.capacity_s
        async with self._scheduler(OrchestratorConfig()) as scheduler:
            fates = await Source(scheduler, seed=0).at_once(replace(ask, deadline_s=None), 2 * NUM_SLOTS, seconds)
        return throughput(fates, seconds / 4, seconds)  # the first requests are slower

    async def _overload(self, ask: Ask, capacity: float) -> Overloaded:
        seconds = self._times.overload_s
        most = math.ceil(capacity * BOUND_S)
        config = OrchestratorConfig(max_queued_requests=most if ask.deadline_s is None else 8 * most)
        async with self._scheduler(config) as scheduler:
            source = Source(scheduler, seed=1)
            loading = asyncio.create_task(source.at_rate(ask, FACTOR * capacity, seconds))
            await asyncio.sleep(seconds / 4)  # until memory is measured
            early = _memory_mib()
            return Overloaded(await loading, (early, _memory_mib()))

    def _report_overload(self, policy: str, ask: Ask, capacity: float, found: Overloaded) -> None:
        name = case(tokens=ask.num_tokens, streams=NUM_SLOTS, policy=policy, trace="overload")
        refusal_ms, ttft_s = percentile(found.refusals_ms, 99), percentile(found.ttfts_s, 95)
        goodput = throughput(found.fates, 0.0, self._times.overload_s)
        early, late = found.memory
        for metric, unit, value, baseline, promised in (
            ("p99_ms", "ms", refusal_ms, "promised", REFUSAL_BAR_MS),
            ("ttft_s", "s", ttft_s, "promised", BOUND_S),
            ("goodput", "1/s", goodput, "capacity", capacity),
            ("rss_mib", "MiB", late, "early", early),
            ("recovery_s", "s", found.recovery_s, "promised", BOUND_S),
        ):
            self._reporter.add(name, metric, unit, baseline, Pairs([value], [promised]))
        self._console.print(f"  {policy}: {len(found.fates)} came, {len(found.refusals_ms)} were refused", markup=False)
        self._bars.at_most(f"{policy}: p99 of refusals, ms", refusal_ms, REFUSAL_BAR_MS)
        self._bars.at_most(f"{policy}: p95 of the time to first token, over the bound", ttft_s / BOUND_S, TTFT_BAR)
        self._bars.at_least(f"{policy}: goodput over capacity", goodput / capacity, GOODPUT_BAR)
        self._bars.at_most(f"{policy}: memory, over what it was", late / early, MEMORY_BAR)
        self._bars.at_most(f"{policy}: recovery, over the bound", found.recovery_s / BOUND_S, TTFT_BAR)

    async def _fairness(self, ask: Ask) -> None:
        capacity, seconds, rounds = await self._capacity(ask), self._times.fair_s, self._times.num_rounds
        rate = LIGHT_PART * capacity
        light = replace(ask, tenant=Tenant("light"))
        heavy = replace(ask, tenant=Tenant("heavy", max_running=NUM_SLOTS - NUM_RESERVED))
        config = OrchestratorConfig(max_queued_requests=math.ceil(capacity * BOUND_S))
        alone, beside = [], []
        with progress("fair", rounds) as advance:
            for round_ in range(rounds):
                async with self._scheduler(config) as scheduler:
                    source = Source(scheduler, seed=10 * round_)
                    alone.append(_p95_s(await source.at_rate(light, rate, seconds)))
                    other = asyncio.create_task(
                        Source(scheduler, seed=10 * round_ + 5).at_rate(heavy, UNEQUAL * rate, seconds)
                    )
                    beside.append(_p95_s(await source.at_rate(light, rate, seconds)))
                    await other
                advance()
        name = case(tokens=ask.num_tokens, streams=NUM_SLOTS, trace="fair")
        self._reporter.add(name, "ttft_s", "s", "alone", Pairs(beside, alone))
        over_alone = statistics.median(ours / own for ours, own in zip(beside, alone, strict=True))
        self._bars.at_most("light tenant's p95 of the time to first token, over alone", over_alone, FAIR_BAR)

    @contextlib.asynccontextmanager
    async def _scheduler(self, config: OrchestratorConfig) -> AsyncIterator[RequestScheduler]:
        config = replace(config, disaggregation="always")  # the engine never prefills: one capacity for all requests
        members, secret = self._cluster.members, self._cluster.secret
        orchestrator = build_orchestrator(members, self._planner, SystemClock(), secret=secret, config=config)
        orchestrator.start()
        try:
            yield orchestrator.scheduler
        finally:
            await orchestrator.close()


def _shorter(ask: Ask) -> Ask:
    return replace(ask, num_tokens=_QUICK_TOKENS, max_tokens=min(ask.max_tokens, _QUICK_OUTPUT))


def _p95_s(fates: Sequence[Fate]) -> float:
    """Return the 95th percentile of the times to first token. The time of a refused request is infinite."""
    return percentile([fate.ttft_s for fate in fates], 95)


def _memory_mib() -> float:
    """Return the resident MiB of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_MIB


async def run(args: argparse.Namespace) -> int:
    """Measure all cases. Return 0, or 1 if `--bars` is given and a value misses its limit."""
    folder = resolve(args)
    config = local_config(args.dtype, num_ranks=1, num_slots=NUM_SLOTS)  # keeps no prefixes: prompts come again
    async with LocalCluster(ClusterPlan(config, ResolvedModel(folder)), SystemClock()) as cluster:
        planner = await asyncio.to_thread(served_planner, cluster.plan)
        bars = await _Bench(args, cluster, planner).run()
    return bars.close() if args.bars else 0


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--cases", default=",".join((*_CASES, _FAIR)), help="cases to run")
    parser.add_argument("--bars", action="store_true", help="exit with 1 when a bar is missed")
    args = parser.parse_args()
    if unknown := set(args.cases.split(",")) - {*_CASES, _FAIR}:
        parser.error(f"--cases: {', '.join(sorted(unknown))} is unknown: use {', '.join((*_CASES, _FAIR))}")
    return asyncio.run(run(args))


if __name__ == "__main__":
    sys.exit(main())
