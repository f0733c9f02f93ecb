"""Benchmark of the per-prompt choice between disaggregated and local prefill.

The policy `auto` decides for each prompt whether a chain of prefill ranks or the generation engine prefills it. The
benchmark compares `auto` with the policies that always or never use the chain.

The load runs on a local cluster: an orchestrator, a prefill rank and a generation engine with one thread each. Some
streams generate tokens all the time. Short prompts (32 to 256 tokens) and a few long ones (2,000 to 4,000) arrive at
random times; each requests one token. Fewer than one prompt in twenty is long, so the 95th percentile is that of a
short prompt.

The policies are those of the orchestrator (`orchestrator.disaggregation`). All use the same workers and the same cost
model, which is calibrated first. They serve the same arrivals, one policy after another. Each output row compares
`auto` with another policy in one metric: the mean or the 95th percentile of the time to first token, or the 99th
percentile of the time between two tokens of the streams. At the end, the reasons for each choice are printed.

With `--bars`, the benchmark fails unless `auto` is better than both other policies in the mean and in the 95th
percentile.
"""

import argparse
import asyncio
import statistics
import sys
from collections import Counter
from dataclasses import dataclass, replace
from time import time_ns
from typing import get_args

from rich.console import Console

from baton.planning.hardware import ModelCosts
from baton.planning.planner import ChainPlanner
from baton.process.clock import SystemClock
from benchmarks.elastic import calibrate
from benchmarks.support.harness import Bars, Pairs, Reporter, case, make_parser, progress, resolve
from benchmarks.support.local_config import local_config
from benchmarks.support.mixed_load import Asked, ask, controlled, mixed, p99, streaming
from benchmarks.support.open_loop import percentile
from deploy.groups.cluster import LocalCluster
from deploy.machine.cluster_plan import ClusterPlan
from deploy.machine.planners import served_planner
from deploy.machine.resolved_model import ResolvedModel
from orchestrator.requests.config import Disaggregation, OrchestratorConfig

ROUNDS = 9
QUICK_ROUNDS = 1
WAYS: tuple[Disaggregation, ...] = get_args(Disaggregation)
NUM_SHORT, NUM_LONG, SECONDS = 40, 2, 24.0
QUICK_SHORT, QUICK_LONG, QUICK_SECONDS = 5, 1, 3.0
NUM_STREAMS = 4
BAR = 1.0
"""Minimum ratio of another policy's time to first token to that of `auto`. Applies to both other policies, `always` and
`never`, and both to the mean and to the 95th percentile."""


@dataclass(frozen=True)
class Served:
    """Measurements of one policy in one round."""

    asked: list[Asked]
    gaps_ms: list[float]
    """Times between consecutive tokens of the running streams in milliseconds, measured while prompts were served."""

    @property
    def mean_s(self) -> float:
        """Mean time to first token of the prompts, in seconds."""
        return statistics.mean(each.ttft_s for each in self.asked)

    @property
    def p95_s(self) -> float:
        """95th percentile of the prompts' times to first token, in seconds."""
        return percentile([each.ttft_s for each in self.asked], 95)

    @property
    def p99_ms(self) -> float:
        """99th percentile of the time between two consecutive tokens of a running stream, in milliseconds."""
        return p99(self.gaps_ms)


async def serve(cluster: LocalCluster, planner: ChainPlanner, way: Disaggregation, seed: int, quick: bool) -> Served:
    """Serve the arrivals of one round while other streams generate tokens. `way` is the disaggregation policy that
    chooses where prompts are prefilled. Return the measurements."""
    sizes = (QUICK_SHORT, QUICK_LONG, QUICK_SECONDS) if quick else (NUM_SHORT, NUM_LONG, SECONDS)
    async with (
        controlled(cluster, planner, OrchestratorConfig(disaggregation=way)) as scheduler,
        streaming(scheduler, NUM_STREAMS) as gaps,
    ):
        start_ns = time_ns()
        asked = await asyncio.gather(*(ask(scheduler, arrival) for arrival in mixed(seed, *sizes)))
        return Served(asked, gaps.between_ms(start_ns, time_ns()))


def report(reporter: Reporter, bars: Bars, console: Console, found: dict[Disaggregation, list[Served]]) -> None:
    """Report `auto` compared with every other policy. The scheduler gives a reason for each choice between the chain
    and local prefill. Print, for each policy, each reason and its number of prompts."""
    name = case(streams=NUM_STREAMS, ranks=1, policy="auto", trace="mixed")
    for way in WAYS[1:]:
        for metric, unit, attribute in (
            ("ttft_s", "s", "mean_s"),
            ("ttft_p95_s", "s", "p95_s"),
            ("p99_ms", "ms", "p99_ms"),
        ):
            ours, theirs = ([getattr(each, attribute) for each in found[side]] for side in ("auto", way))
            row = reporter.add(name, metric, unit, way, Pairs(ours, theirs))
            if metric != "p99_ms":
                bars.at_least(f"{metric}, {way} over auto", row.ratio, BAR)
    for way, rounds in found.items():
        reasons = Counter(each.reason for served in rounds for each in served.asked)
        shown = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        console.print(f"  {way}: prompts by reason: {shown}", markup=False)


async def run(args: argparse.Namespace, costs: ModelCosts) -> int:
    """Measure all rounds, after a warm-up round. Return 0, or 1 if `--bars` is given and a value misses its limit."""
    reporter, bars, console = Reporter("disaggregation", args.json), Bars(), Console(stderr=True, highlight=False)
    folder, config = (
        resolve(args),
        local_config(args.dtype, num_ranks=1),
    )  # without cached prefixes, because prompts repeat
    found: dict[Disaggregation, list[Served]] = {way: [] for way in WAYS}
    rounds = args.pairs or (QUICK_ROUNDS if args.quick else ROUNDS)
    async with LocalCluster(ClusterPlan(config, ResolvedModel(folder)), SystemClock()) as cluster:
        like = await asyncio.to_thread(served_planner, cluster.plan)
        planner = ChainPlanner(
            replace(like.nominal, prefill=costs.prefill),
            max_ranks=like.max_ranks,
            max_tokens=like.max_tokens,
            local=like.local,
            devices=like.devices,
        )
        with progress("arrivals", rounds + 1) as advance:
            for seed in range(rounds + 1):
                for way in WAYS:
                    served = await serve(cluster, planner, way, seed, args.quick or not seed)
                    found[way] += [served] if seed else []
                advance()
    report(reporter, bars, console, found)
    reporter.close()
    return bars.close() if args.bars else 0


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=0, help=f"rounds; 0: {ROUNDS}, or {QUICK_ROUNDS} with --quick")
    parser.add_argument("--bars", action="store_true", help="exit with 1 when a bar is missed")
    args = parser.parse_args()
    args.ranks = 1
    return asyncio.run(run(args, calibrate(args)))


if __name__ == "__main__":
    sys.exit(main())
