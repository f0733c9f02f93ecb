"""Benchmark of elastic chain width: the scheduler decides for each prompt how many ranks of a chain prefill it (the
width of the chain).

Each round has a burst of prompts: two of 6,000 tokens arrive at its start, and ten of 256 tokens arrive 0.2 to 2 s
later. Each prompt requests one output token. The benchmark compares two settings of the orchestrator: `elastic`, and
the baseline `static`, which prefills each prompt on all ranks in order of arrival.

Prompts pass through a whole local cluster: an orchestrator, a chain of two ranks with one thread each, and a generation
engine. Both settings use the same workers and the same cost model, which is calibrated first. They serve the same burst
one after the other. Output rows: mean time to first token (TTFT) of the short prompts, and of the long prompts.

With `--bars`, the benchmark fails unless the mean TTFT of short prompts with `elastic` is at most a third of that with
`static`, and the mean TTFT of long prompts is at most 15 % higher than with `static`.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from rich.console import Console

from baton.planning.hardware import ModelCosts
from baton.planning.planner import ChainPlanner
from baton.process.clock import SystemClock
from baton.sampling_params import SamplingParams
from baton.types import RequestId, TokenEvent
from benchmarks.baselines.calibrating import LENGTHS as CALIBRATED
from benchmarks.baselines.calibrating import QUICK_LENGTHS as QUICK_CALIBRATED
from benchmarks.baselines.calibrating import calibrated
from benchmarks.baselines.ranks import Ranks
from benchmarks.support.arrivals import LONG_TOKENS, SHORT_TOKENS, Arrival, burst
from benchmarks.support.harness import Bars, Pairs, Reporter, case, make_parser, progress, random_prompt, resolve
from benchmarks.support.local_config import local_config
from benchmarks.support.rates import runnable
from deploy.groups.cluster import LocalCluster
from deploy.machine.cluster_plan import ClusterPlan
from deploy.machine.planners import cpu_costs
from deploy.machine.resolved_model import ResolvedModel
from orchestrator.composition import build_orchestrator
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.record import Finished
from orchestrator.requests.request import Request
from orchestrator.scheduler import RequestScheduler

ROUNDS = 5
QUICK_ROUNDS = 2
QUICK_LONG_TOKENS = 600
SHORT_BAR = 3.0
"""Minimum ratio of the mean TTFT of `static` to that of `elastic`, for short prompts."""
LONG_BAR = 0.15
"""Maximum increase of the long prompts' mean TTFT by `elastic`, as a fraction of their mean TTFT with `static`."""
_POLICIES = {"elastic": True, "static": False}


@dataclass(frozen=True)
class Served:
    """Result of one prompt that passed through the cluster."""

    arrival: Arrival
    ttft_s: float
    num_ranks: int
    """Number of ranks that prefilled the prompt."""
    reason: str
    """Scheduler's reason for the number of ranks, or a note that the generation group prefilled the prompt."""


async def serve(scheduler: RequestScheduler, arrival: Arrival) -> Served:
    """Wait until the prompt's arrival time, send the prompt, and read its stream to the end. Return the result."""
    await asyncio.sleep(arrival.at_s)  # from the burst's start
    clock, first_s, finished = SystemClock(), 0.0, None
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    prompt = random_prompt(arrival.num_tokens, arrival.seed)
    start_s = clock.now_s()
    async with contextlib.aclosing(scheduler.generate(Request(RequestId(uuid.uuid4().hex), prompt, params))) as events:
        async for event in events:
            if isinstance(event, TokenEvent):
                first_s = first_s or clock.now_s()
            elif isinstance(event, Finished):
                finished = event
    assert finished is not None, "a stream without an end"
    assert first_s and not finished.error, finished
    timings = finished.timings
    reason = timings.prefill.width.reason if timings.prefill.width is not None else "prefilled by the generation group"
    return Served(arrival, first_s - start_s, len(timings.prefill.ranks), reason)


class _Bench:
    """Local cluster whose workers serve both policies, and the measurements on it."""

    def __init__(self, args: argparse.Namespace, cluster: LocalCluster, planner: ChainPlanner) -> None:
        self._args, self._cluster, self._planner = args, cluster, planner
        self._long_tokens = QUICK_LONG_TOKENS if args.quick else LONG_TOKENS
        self._console = Console(stderr=True, highlight=False)

    async def measure(self) -> dict[str, list[list[Served]]]:
        """Run a warm-up round of short prompts, then the measured rounds. In each round, both policies serve the same
        burst of prompts, one after the other. Return the results of the rounds by policy."""
        found: dict[str, list[list[Served]]] = {policy: [] for policy in _POLICIES}
        rounds = self._args.pairs or (QUICK_ROUNDS if self._args.quick else ROUNDS)
        with progress("bursts", rounds + 1) as advance:
            for seed in range(rounds + 1):
                arrivals = burst(seed, self._long_tokens if seed else SHORT_TOKENS)
                for policy in _POLICIES:
                    async with self._scheduler(policy) as scheduler:
                        served = await asyncio.gather(*(serve(scheduler, each) for each in arrivals))
                    found[policy] += [served] if seed else []
                advance()
        return found

    def report(self, reporter: Reporter, bars: Bars, found: dict[str, list[list[Served]]]) -> None:
        """Report the mean TTFT of short and of long prompts, and the numbers of ranks that prefilled them."""
        ratios = {}
        for num_tokens in (SHORT_TOKENS, self._long_tokens):
            means = {policy: [_mean(served, num_tokens) for served in rounds] for policy, rounds in found.items()}
            name = case(tokens=num_tokens, ranks=self._args.ranks, policy="elastic", trace="burst")
            row = reporter.add(name, "ttft_s", "s", "static", Pairs(means["elastic"], means["static"]))
            ratios[num_tokens] = row.ratio
            for policy, rounds in found.items():
                widths = Counter(each.num_ranks for each in _of(rounds, num_tokens))
                shown = ", ".join(f"{count} on {width}" for width, count in sorted(widths.items()))
                self._console.print(f"  {num_tokens} tokens, {policy}: prompts by ranks: {shown}", markup=False)
            reason = _of(found["elastic"], num_tokens)[0].reason
            self._console.print(f"  {num_tokens} tokens, for example: {reason}", markup=False)
        bars.at_least("short prompts, static over elastic", ratios[SHORT_TOKENS], SHORT_BAR)
        bars.at_most("long prompts' loss", 1 / ratios[self._long_tokens] - 1, LONG_BAR)

    @contextlib.asynccontextmanager
    async def _scheduler(self, policy: str) -> AsyncIterator[RequestScheduler]:
        config = OrchestratorConfig(elastic=_POLICIES[policy])
        members, secret = self._cluster.members, self._cluster.secret
        orchestrator = build_orchestrator(members, self._planner, SystemClock(), secret=secret, config=config)
        orchestrator.start()
        try:
            yield orchestrator.scheduler
        finally:
            await orchestrator.close()


def _of(rounds: Sequence[Sequence[Served]], num_tokens: int) -> list[Served]:
    return [each for served in rounds for each in served if each.arrival.num_tokens == num_tokens]


def _mean(served: Sequence[Served], num_tokens: int) -> float:
    return statistics.mean(each.ttft_s for each in _of([served], num_tokens))


def calibrate(args: argparse.Namespace) -> ModelCosts:
    """Return a cost model, calibrated on ranks that have the same configuration as the cluster's ranks."""
    folder, cores = resolve(args), sorted(os.sched_getaffinity(0))[: args.ranks]
    with Ranks.running(folder, args.dtype, [(core,) for core in cores]) as ranks:
        lengths = QUICK_CALIBRATED if args.quick else CALIBRATED
        kernel = runnable(["native", "sdpa"])[0]
        return calibrated(ranks, cpu_costs(ResolvedModel(folder), args.dtype, 1), kernel, lengths)


async def run(args: argparse.Namespace, costs: ModelCosts) -> int:
    """Measure all rounds. Return 0, or 1 if `--bars` is given and a value misses its limit."""
    reporter, bars = Reporter("elastic", args.json), Bars()
    config = local_config(args.dtype, num_ranks=args.ranks)  # keeps no prefixes: the prompts come again
    async with LocalCluster(ClusterPlan(config, ResolvedModel(resolve(args))), SystemClock()) as cluster:
        planner = ChainPlanner(costs, max_ranks=args.ranks, max_tokens=config.generate.max_slot_tokens)
        bench = _Bench(args, cluster, planner)
        bench.report(reporter, bars, await bench.measure())
    reporter.close()
    return bars.close() if args.bars else 0


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks of the chain, one thread each")
    parser.add_argument("--pairs", type=int, default=0, help=f"rounds; 0: {ROUNDS}, or {QUICK_ROUNDS} with --quick")
    parser.add_argument("--bars", action="store_true", help="exit with 1 when a bar is missed")
    args = parser.parse_args()
    return asyncio.run(run(args, calibrate(args)))


if __name__ == "__main__":
    sys.exit(main())
