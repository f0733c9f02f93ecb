"""Benchmark of the traffic simulator: compares a live cluster with the simulator's predictions.

The cluster has a real orchestrator and supervisor, gRPC, KV transfers, and one process per worker. Only the engines are
paced (`tests.support.paced`): they compute with a tiny model, then wait until they have taken as long as the cost model
predicts for a large model. The same traces are sent to the cluster in an open loop, and run through the simulator with
the same cost model. The cost model includes the time that a request spends outside its prefill chain, measured on the
idle cluster.

There are three traces, whose seeds were fixed before any run:

- `bimodal`: 30 % of the prompts have 3,000 tokens, the others 100
- `bursty`: times between arrivals have a squared coefficient of variation of 8
- `shifting`: long prompts, then long answers

For each trace, the simulator first finds the best fixed split of the groups into prefill and generation groups. The
best split has the highest rate at which 95 % of the requests meet both targets: 4 s to the first token and 90 ms
between tokens. The trace is then sent at a fraction of this rate to a cluster with this split. Output rows: 50th and
95th percentile of the time to first token and of the time between tokens, as clients measure them; the baseline is
`simulated`.

With `--policy autoscale`, the live and the simulated cluster start with this split and are autoscaled. Both have the
same number of groups, the same targets, and the same times to start a group or to change its role.

With `--bars`, the benchmark fails if a request fails, if a 50th percentile differs by more than 15 %, or if a 95th
percentile differs by more than 25 %.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from baton_lab.traffic.policies import AutoscalePolicy
from baton_lab.traffic.results import Targets
from baton_lab.traffic.traces.generators import Lengths, Phase, bimodal, bursty, shifting
from baton_lab.traffic.traces.trace import Trace
from benchmarks.support.crowding import Crowding
from benchmarks.support.harness import Bars, Pairs, Reporter, case
from orchestrator.autoscaling.actions import LeadTimes
from orchestrator.autoscaling.demand import ServiceModel
from orchestrator.requests.config import AutoscalingConfig
from tests.support.paced.cluster import PacedPlan
from tests.support.paced.comparing import LATENCIES, PERCENTILES, Comparison, compare, simulate
from tests.support.paced.hardware import PacedHardware, write_paced_model

NUM_GROUPS = 7
NUM_SLOTS = 16
SECONDS, QUICK_SECONDS = 90.0, 15.0
TARGETS = Targets(ttft_s=4.0, itl_s=0.09)
BARS = {"p50": 0.15, "p95": 0.25}
LONG_PROMPTS, LONG_ANSWERS, MIXED = Lengths(3000, 32), Lengths(100, 128), Lengths(1000, 64)
_BEARS = 0.95
_PROBE_S, _QUICK_PROBE_S = 240.0, 30.0
_PROBE_SEED = 99
_PROBES = 8
_MOST_RATE = 40.0

COLD_START_S, FLIP_S = 5.0, 1.0
SCALING: dict[str, Any] = {
    "mode": "act",
    "ttft_p95_s": TARGETS.ttft_s,
    "itl_p95_s": TARGETS.itl_s,
    "min": 2,
    "max": NUM_GROUPS,
    "cooldown_s": 20.0,
    "cold_start_s": COLD_START_S,
    "flip_s": FLIP_S,
}

MakeTrace = Callable[[float, float, int], Trace]
"""Function that creates a trace. Its arguments are a rate in requests per second, a duration in seconds and a seed."""


@dataclass(frozen=True)
class Scenario:
    """One kind of traffic, its rate relative to the cluster's capacity, and its seed."""

    make: MakeTrace
    load: float
    """Request rate of the trace, as a fraction of the highest rate that the best fixed split of the groups can
    serve."""
    seed: int


def _bimodal(rate: float, seconds: float, seed: int) -> Trace:
    return bimodal(rate, seconds, seed, (LONG_PROMPTS, LONG_ANSWERS), share=0.3)


def _bursty(rate: float, seconds: float, seed: int) -> Trace:
    return bursty(rate, seconds, seed, MIXED)


def _shifting(rate: float, seconds: float, seed: int) -> Trace:
    phases = [Phase(seconds / 2, share * rate, kind) for share, kind in ((0.7, LONG_PROMPTS), (1.3, LONG_ANSWERS))]
    return shifting(phases, seed)


SCENARIOS = {
    "bimodal": Scenario(_bimodal, 0.9, seed=1),
    "bursty": Scenario(_bursty, 0.8, seed=2),
    "shifting": Scenario(_shifting, 0.9, seed=3),
}


def capacity(
    scenario: Scenario, hardware: PacedHardware, num_ranks: int, probe_s: float
) -> tuple[float, tuple[int, int]]:
    """Return the highest request rate that a fixed split of the groups can serve, and this split as (prefill groups,
    generation groups). A rate can be served if the fraction `_BEARS` of the requests meets both latency targets in
    simulated traces of `probe_s` seconds."""
    best = (0.0, (1, 1))
    for num_prefill in range(1, NUM_GROUPS):
        split = num_prefill, NUM_GROUPS - num_prefill
        plan = _plan(split, num_ranks)

        def bears(rate: float, plan: PacedPlan = plan) -> bool:
            trace = scenario.make(rate, probe_s, _PROBE_SEED)
            return bool(simulate(trace, hardware, plan).is_good(TARGETS).mean() >= _BEARS)

        low, high = best[0], _MOST_RATE
        if low and not bears(low):
            continue
        for _ in range(_PROBES):
            middle = (low + high) / 2
            low, high = (middle, high) if bears(middle) else (low, middle)
        best = max(best, (low, split))
    return best


def _plan(split: tuple[int, int], num_ranks: int) -> PacedPlan:
    """Return the cluster for a division, with a queue that refuses nothing and long waits for groups."""
    limits = {"max_queued_requests": 10**6, "max_queued_tokens": 10**9, "generation_wait_s": 600.0}
    return PacedPlan(split, num_ranks=num_ranks, num_slots=NUM_SLOTS, orchestrator=limits)


def _scaler(num_ranks: int, hardware: PacedHardware) -> AutoscalePolicy:
    """Return the autoscaler of the simulated cluster, with the settings of the live one."""
    service = ServiceModel(hardware.recalling_planner(max_ranks=num_ranks), num_ranks, NUM_SLOTS)
    return AutoscalePolicy(AutoscalingConfig(**SCALING), service, LeadTimes(COLD_START_S, FLIP_S))


class _Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._reporter, self._bars = Reporter("live_scaling", args.json), Bars()
        self._console = Console(stderr=True, highlight=False)

    async def run(self) -> int:
        """Compare the live cluster with the simulator on all requested traces. Return the exit status."""
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made) / "paced"
            folder.mkdir()
            hardware = write_paced_model(folder)
            for name in self._args.traces.split(","):
                await self._compare(name, folder, hardware)
        self._reporter.close()
        return self._bars.close() if self._args.bars else 0

    async def _compare(self, name: str, folder: Path, hardware: PacedHardware) -> None:
        scenario, num_ranks = SCENARIOS[name], self._args.ranks
        probe_s, seconds = (_QUICK_PROBE_S, QUICK_SECONDS) if self._args.quick else (_PROBE_S, SECONDS)
        rate, split = capacity(scenario, hardware, num_ranks, probe_s)
        trace = scenario.make(scenario.load * rate, seconds, scenario.seed)
        shown = (
            f"{len(trace)} requests at {scenario.load:g} of {rate:.2f}/s, which {split[0]}:{split[1]} groups sustain"
        )
        self._console.print(f"  {name}: {shown}", markup=False)
        plan, scaler = _plan(split, num_ranks), None
        if self._args.policy == "autoscale":
            plan = replace(plan, cold_start_s=COLD_START_S, flip_s=FLIP_S, sections={"autoscaling": SCALING})
            scaler = partial(_scaler, num_ranks)
        crowding = Crowding()
        found = await compare(folder, hardware, plan, trace, seed=scenario.seed, scaler=scaler)
        self._report(name, found, crowding.share())

    def _report(self, name: str, found: Comparison, others: float) -> None:
        besides_ms, errors = 1000 * found.hardware.costs.prefill.head_s, found.played.errors
        self._console.print(
            f"  {name}: a request takes {besides_ms:.1f} ms outside its chain; requests were sent up to "
            f"{1000 * found.late_s:.1f} ms late (p95); {len(errors)} failed; other programs took "
            f"{others:.0%} of the processors' time",
            markup=False,
        )
        self._bars.at_most(f"{name}: failed requests", len(errors), 0)
        for latency in LATENCIES:
            for percentile in PERCENTILES:
                live_s, simulated_s = found.values(latency, percentile)
                named = case(trace=name, ranks=self._args.ranks, policy=self._args.policy)
                metric = f"{percentile}_{latency}"
                self._reporter.add(named, metric, "s", "simulated", Pairs([live_s], [simulated_s]))
                off = abs(found.ratio(latency, percentile) - 1)
                self._bars.at_most(f"{name}: {metric}, off by", off, BARS[percentile])


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--traces", default=",".join(SCENARIOS), metavar="NAME,...", help="traces to run (default: all)"
    )
    parser.add_argument("--policy", choices=("static", "autoscale"), default="static", help="(default: static)")
    parser.add_argument(
        "--ranks", type=int, default=1, metavar="N", help="number of ranks of a prefill group (default: 1)"
    )
    parser.add_argument("--quick", action="store_true", help="short traces, as a smoke test")
    parser.add_argument("--json", action="store_true", help="print rows as JSON lines")
    parser.add_argument("--bars", action="store_true", help="exit with 1 when a bar is missed")
    args = parser.parse_args()
    if unknown := set(args.traces.split(",")) - set(SCENARIOS):
        parser.error(f"--traces: {', '.join(sorted(unknown))} is unknown: use {', '.join(SCENARIOS)}")
    return asyncio.run(_Bench(args).run())


if __name__ == "__main__":
    sys.exit(main())
