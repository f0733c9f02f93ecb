"""Benchmark of the autoscaler by simulation. Compares it with fixed numbers of groups, with a policy that divides the
mean load by a group's throughput and ignores queueing (load regression), and with a policy that has thresholds on queue
lengths.

The traffic simulator (`baton_lab.traffic`) replays traces on eight groups of Llama-3.1-8B on A100s at nominal rates. A
cold start takes 30 s, and changing a group's role takes 2 s. There are two kinds of request: 6,000 prompt and 64 output
tokens, and 200 prompt and 512 output tokens.

The capacity for a kind of request is the highest steady rate at which the best fixed division of the groups into
prefill and generation serves 95 % of the requests within both latency targets. It is found by simulation. The request
rate of a trace is a fraction of the capacity. A `shifting` trace changes the kind of request every 300 s, which is the
time of 10 cold starts. A `steady` trace has one kind. Policies that change the groups begin with four groups of each
role.

Output columns: the percentage of requests within both targets with each policy, the number of times that the autoscaler
changed the numbers of groups, and the number of reversals. A reversal is a change that reverts the previous change of
the same phase (300 s): it shifts groups back to the other role.

With `--bars`, the benchmark fails unless all of these are true for the autoscaler:

- on shifting traces, the fraction of requests within both targets is at least 1.3 times the fraction with the best
  fixed division, and at least 1.15 times the fraction with load regression
- on steady traces, this fraction is at least 0.97 times the fraction with the best fixed division
- each trace has at most 4 reversals
"""

import argparse
import statistics
import sys
from collections.abc import Iterable

from rich.console import Console

from baton.planning.hardware import ModelCosts
from baton_lab.study.known_hardware import hardware_of
from baton_lab.study.known_models import shape_of
from baton_lab.traffic.comparing import Setting
from baton_lab.traffic.results import Results, ScalerEvent
from baton_lab.traffic.service import GroupSizes, RecallingPlanner
from baton_lab.traffic.traces.generators import OUTPUT_HEAVY, PROMPT_HEAVY, Lengths, Phase, shifting, steady
from baton_lab.traffic.traces.trace import Trace
from benchmarks.support.harness import Bars
from deploy.options.numbers import counts, positive
from deploy.options.screen import number_table
from orchestrator.requests.config import AutoscalingConfig

MODEL, HARDWARE = "llama-3.1-8b", "a100-eager"
NUM_GROUPS = 8
PHASE_S = 300.0
NUM_PHASES = 4
LOADS = (0.8, 0.95)
SEEDS = "0,1,2,3,4"
SHIFT_BAR, LOAD_BAR, STEADY_BAR = 1.3, 1.15, 0.97
MOST_REVERSALS = NUM_PHASES
POLICIES = {
    "autoscale": "autoscaler",
    "load": "load regression",
    "queue": "queue threshold",
    "best-static": "best fixed division",
}
"""Names of the compared policies in the simulator, with the headings of their columns."""
_BEARS = 0.95
_PROBE_S = 600.0
_PROBES = 6


def setting() -> Setting:
    """Return the configuration of the simulated cluster: its groups, latency targets, and the autoscaler's limits."""
    planner = RecallingPlanner(ModelCosts.of(shape_of(MODEL), hardware_of(HARDWARE)), max_ranks=1, max_tokens=8192)
    config = AutoscalingConfig(ttft_p95_s=6.0, itl_p95_s=0.04, min=2, max=NUM_GROUPS, cooldown_s=60.0)
    half = NUM_GROUPS // 2
    return Setting(planner, GroupSizes(1, 16, 30.0, 2.0), config, (half, NUM_GROUPS - half))


def capacity(on: Setting, kind: Lengths) -> float:
    """Return the highest steady request rate that the best fixed division of the groups can serve. A rate can be served
    if 95 % of the requests meet both latency targets."""
    guess = on.predicted_rate(kind)
    low, high = 0.7 * guess, 1.1 * guess
    for _ in range(_PROBES):
        middle = (low + high) / 2
        trace = steady(middle, _PROBE_S, 99, kind)
        bears = any(on.replay(trace, split).summary(on.targets)["good_share"] >= _BEARS for split in _likely(kind))
        low, high = (middle, high) if bears else (low, middle)
    return low


def reversals(events: Iterable[ScalerEvent]) -> int:
    """Return the number of changes that revert the previous change of the same phase (period of PHASE_S seconds). Of
    two such changes, one increases the number of prefill groups relative to that of generation groups, and the other
    decreases it."""
    num_reversed, last, phase = 0, 0, -1
    for event in events:
        before, after = (tuple(map(int, side.split(":"))) for side in event.what.split(" -> "))
        lean = (after[0] - before[0]) - (after[1] - before[1])
        if int(event.time_s // PHASE_S) != phase:
            phase, last = int(event.time_s // PHASE_S), 0
        num_reversed += lean * last < 0
        last = lean or last
    return num_reversed


def traces(capacities: dict[Lengths, float], load: float, seed: int) -> list[Trace]:
    """Return the traces for one load and seed: one shifting trace, and one steady trace for each kind of request."""
    kinds = [(PROMPT_HEAVY, OUTPUT_HEAVY)[phase % 2] for phase in range(NUM_PHASES)]
    made = [shifting([Phase(PHASE_S, load * capacities[kind], kind) for kind in kinds], seed)]
    return made + [steady(load * rate, PHASE_S, seed, kind) for kind, rate in capacities.items()]


def main() -> int:
    """Run the benchmark for all loads and seeds. Return 0, or 1 if a value misses its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default=SEEDS, metavar="N,...", help="seeds of the traces (default: %(default)s)")
    parser.add_argument(
        "--loads", default=",".join(map(str, LOADS)), metavar="X,...", help="loads, as fractions of the capacity"
    )
    parser.add_argument(
        "--capacities", metavar="A,B", help="capacities for both kinds in requests per second, instead of a search"
    )
    parser.add_argument("--bars", action="store_true", help="exit with 1 when a bar is missed")
    args = parser.parse_args()
    on, bars = setting(), Bars()
    kinds = (PROMPT_HEAVY, OUTPUT_HEAVY)
    given = [positive("--capacities", each) for each in args.capacities.split(",")] if args.capacities else []
    capacities = dict(zip(kinds, given or [capacity(on, kind) for kind in kinds], strict=True))
    print(
        "capacities: " + ", ".join(f"{kind.prompt} -> {kind.output}: {rate:.2f}/s" for kind, rate in capacities.items())
    )
    headings = ["case", *POLICIES.values(), "changes", "reversals"]
    table = number_table("share of requests within both targets, %", headings, words="case")
    ratios: dict[str, list[float]] = {"shifting": [], "regression": [], "steady": []}
    for load in [positive("--loads", each) for each in args.loads.split(",")]:
        for seed in counts("--seeds", args.seeds, 2**31, least=0):
            for trace in traces(capacities, load, seed):
                row = compare(on, trace, ratios)
                case = f"{trace.name} {int(trace.prompt_tokens.mean())} load {load:g} seed {seed}"
                print(case, *row, flush=True)
                table.add_row(case, *row)
                if args.bars:
                    bars.at_most(f"{case}: reversals", float(row[-1]), MOST_REVERSALS)
    Console().print(table)
    if args.bars:
        check(bars, ratios)
    return bars.close()


def compare(on: Setting, trace: Trace, ratios: dict[str, list[float]]) -> list[str]:
    """Simulate a trace under all policies. Return the cells of the trace's row in the printed table. Also append to the
    lists in `ratios` how much better the autoscaler is than other policies: the fraction of requests within both
    targets with the autoscaler, divided by that with the other policy."""
    runs: dict[str, Results] = {policy: on.run(trace, policy)[1] for policy in POLICIES}
    share = {policy: max(results.summary(on.targets)["good_share"], 1e-3) for policy, results in runs.items()}
    if trace.name == "shifting":
        ratios["shifting"].append(share["autoscale"] / share["best-static"])
        ratios["regression"].append(share["autoscale"] / share["load"])
    else:
        ratios["steady"].append(share["autoscale"] / share["best-static"])
    events = runs["autoscale"].scaler_events
    return [*(f"{100 * share[policy]:.1f}" for policy in POLICIES), str(len(events)), str(reversals(events))]


def check(bars: Bars, ratios: dict[str, list[float]]) -> None:
    """Check each limit against the smallest ratio over all loads and seeds."""
    for name, what, bar in (
        ("shifting", "shifting traces, autoscaler / best fixed division", SHIFT_BAR),
        ("regression", "shifting traces, autoscaler / load regression", LOAD_BAR),
        ("steady", "steady traces, autoscaler / best fixed division", STEADY_BAR),
    ):
        bars.at_least(f"{what}: lowest (median {statistics.median(ratios[name]):.2f})", min(ratios[name]), bar)


def _likely(kind: Lengths) -> list[tuple[int, int]]:
    """Return the divisions that may be best for a kind: nearly all groups for prefill, or nearly all for generation."""
    few = (1, 2)
    return [(NUM_GROUPS - each, each) if kind is PROMPT_HEAVY else (each, NUM_GROUPS - each) for each in few]


if __name__ == "__main__":
    sys.exit(main())
