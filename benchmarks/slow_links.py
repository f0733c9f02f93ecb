"""Benchmark of prefill over slow links, from 200 down to 5 MB/s, and of the cost model's predictions for them.

There are two or more ranks. Chains and rings use links with the same limited bandwidth (`baselines.paced`). Four
schemes are compared:

- KVR-S: a chain whose chunk sizes are searched separately for each link
- a chain with even chunks
- zigzag ring attention
- a chain of one rank, which needs no link

Each round calibrates the cost model while all ranks are busy, and calibrates each link with separate messages. It then
runs every case once. Output rows: each measured time of a scheme, compared with the time that the calibration of the
same round predicts (`model`). At the end, the benchmark prints the crossings, as measured and as predicted. A crossing
is the bandwidth at which one scheme becomes faster than another. `--plot` draws the measured and predicted times.

If `--bars` is given, the benchmark fails unless KVR-S is within 15 % of the model in every case. It also fails if, at a
crossing of two schemes, the measured ratio of their times differs from the predicted ratio by more than 15 %.
"""

import argparse
import dataclasses
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from baton.planning.chain.partition import as_ranges
from baton.planning.chain.search import search
from baton.planning.chain.wavefront import chain_ttft
from baton.planning.cost_model import BATON, CostModel, LinkModel
from baton.types import TokenRange
from baton_lab.study.comparison import even_partition
from baton_lab.study.peers import zigzag_ring
from benchmarks.baselines.calibrating import LENGTHS as CALIBRATED
from benchmarks.baselines.calibrating import QUICK_LENGTHS as QUICK_CALIBRATED
from benchmarks.baselines.calibrating import at_pace, calibrated
from benchmarks.baselines.pacing import Pace
from benchmarks.baselines.rank_process import Task
from benchmarks.baselines.ranks import Ranks
from benchmarks.plots.slow_links import Curve, draw
from benchmarks.support.crossings import crossing, disagreement, value_at
from benchmarks.support.harness import Bars, Pairs, Reporter, case, make_parser, progress, random_prompt, resolve
from benchmarks.support.rates import runnable
from deploy.machine.planners import cpu_costs
from deploy.machine.resolved_model import ResolvedModel

LINKS = "200,100,50,20,10,5"
QUICK_LINKS = "100,5"
TOKENS = "512,1024,2048"
QUICK_TOKENS = "256"
ROUNDS = 3
MODEL_BAR = 0.15
"""Maximum difference between a measured and the predicted time, as a fraction of the predicted time."""
RIVALS = (("even", "single"), ("zigzag", "single"), ("kvr_s", "single"), ("kvr_s", "zigzag"))
"""Pairs of schemes that are compared. For each pair, the benchmark computes the link speed at which both are equally
fast."""
SCHEMES = ("kvr_s", "even", "zigzag", "single")
_CURVE_POINTS = 40


class _Times:
    """Times in seconds for one prompt length, indexed by scheme, link (slowest first) and round."""

    def __init__(self, num_links: int) -> None:
        self.measured: dict[str, list[list[float]]] = {name: [[] for _ in range(num_links)] for name in SCHEMES}
        self.predicted: dict[str, list[list[float]]] = {name: [[] for _ in range(num_links)] for name in SCHEMES}
        self.lines: dict[str, list[list[float]]] = {name: [] for name in SCHEMES}
        """Predicted seconds for the plot. Each scheme has one list per round, with one value per bandwidth of the
        plot."""

    def add(self, link: int, measured: Mapping[str, float], predicted: Mapping[str, float]) -> None:
        """Add the measured and the predicted seconds, by scheme, of one round. `link` is the index of the link."""
        for name in SCHEMES:
            self.measured[name][link].append(measured[name])
            self.predicted[name][link].append(predicted[name])


def predict(num_tokens: int, num_ranks: int, cost: CostModel) -> dict[str, float]:
    """Return the predicted time to first token in seconds, by scheme."""
    even = even_partition(TokenRange(0, num_tokens), num_ranks)
    return {
        "kvr_s": float(chain_ttft(search(num_tokens, num_ranks, cost, BATON), cost, BATON)),
        "even": float(chain_ttft([len(chunk) for chunk in even], cost, BATON)),
        "zigzag": zigzag_ring(num_tokens, num_ranks, cost),
        "single": float(chain_ttft([num_tokens], cost, BATON)),
    }


class _Bench:
    """Prefill ranks, and measurements on them. Every method blocks."""

    def __init__(self, args: argparse.Namespace, ranks: Ranks, lengths: Sequence[int]) -> None:
        self._ranks, self._lengths = ranks, lengths
        self.kernel = runnable([args.kernel, "sdpa"])[0]
        """Name of the attention kernel that all schemes use."""
        self._links_mb_s = sorted(
            float(each) for each in (args.links or (QUICK_LINKS if args.quick else LINKS)).split(",")
        )
        low, high = self._links_mb_s[0], self._links_mb_s[-1]
        self._grid_mb_s = [low * (high / low) ** (index / (_CURVE_POINTS - 1)) for index in range(_CURVE_POINTS)]
        self.times = {num_tokens: _Times(len(self._links_mb_s)) for num_tokens in lengths}

    @property
    def links_mb_s(self) -> Sequence[float]:
        """Bandwidths of the links in MB/s, slowest first."""
        return self._links_mb_s

    def round(self, seed: int, cost: CostModel) -> None:
        """Run every prompt length on every link once. Record each measured time, and the time that `cost` predicts for
        it."""
        costs = [at_pace(cost, self._ranks, _pace(mb_s)) for mb_s in self._links_mb_s]
        with progress(f"round {seed + 1}", len(self._lengths) * len(costs)) as advance:
            for num_tokens in self._lengths:
                prompt, times = random_prompt(num_tokens, seed), self.times[num_tokens]
                alone = Task("kvr", prompt, (TokenRange(0, num_tokens),), kernel=self.kernel)
                for link, (mb_s, at_link) in enumerate(zip(self._links_mb_s, costs, strict=True)):
                    tasks = {"single": alone, **self._tasks(prompt, mb_s, at_link)}
                    measured = {name: self._ranks.run(task).seconds for name, task in tasks.items()}
                    times.add(link, measured, predict(num_tokens, len(self._ranks), at_link))
                    advance()
                self._draw_lines(num_tokens, costs)

    def curve(self, num_tokens: int) -> Curve:
        """Return the data to plot for one prompt length: the measured times of all rounds, and for each bandwidth the
        median of the times that the rounds predict."""
        times = self.times[num_tokens]
        lines = {
            name: [statistics.median(rounds) for rounds in zip(*times.lines[name], strict=True)] for name in SCHEMES
        }
        return Curve(num_tokens, self._links_mb_s, times.measured, self._grid_mb_s, lines)

    def _draw_lines(self, num_tokens: int, costs: Sequence[CostModel]) -> None:
        """Compute the predicted lines of one round. Between the measured links, link models are interpolated."""
        lines: dict[str, list[float]] = {name: [] for name in SCHEMES}
        bandwidths = [cost.link.bandwidth for cost in costs]
        for mb_s in self._grid_mb_s:
            link = LinkModel(costs[-1].link.latency_s, value_at(self._links_mb_s, bandwidths, mb_s))
            predicted = predict(num_tokens, len(self._ranks), dataclasses.replace(costs[-1], link=link))
            for name, seconds in predicted.items():
                lines[name].append(seconds)
        for name, line in lines.items():
            self.times[num_tokens].lines[name].append(line)

    def _tasks(self, prompt: tuple[int, ...], mb_s: float, cost: CostModel) -> dict[str, Task]:
        whole, width, pace = TokenRange(0, len(prompt)), len(self._ranks), _pace(mb_s)
        searched = as_ranges(search(len(prompt), width, cost, BATON), 0)
        even = even_partition(whole, width)
        return {
            "kvr_s": Task("kvr", prompt, searched, kernel=self.kernel, pace=pace),
            "even": Task("kvr", prompt, even, kernel=self.kernel, pace=pace),
            "zigzag": Task("zigzag", prompt, kernel=self.kernel, pace=pace),
        }


def _pace(mb_s: float) -> Pace:
    return Pace(bandwidth=mb_s * 1e6)


def report(reporter: Reporter, bars: Bars, num_tokens: int, num_ranks: int, bench: _Bench) -> None:
    """Report one output row for each scheme and link, then the link speeds at which two schemes are equally fast."""
    worst, times = 0.0, bench.times[num_tokens]
    for scheme in SCHEMES:
        for link, mb_s in enumerate(bench.links_mb_s):
            name = case(tokens=num_tokens, ranks=num_ranks, scheme=scheme, link=f"{mb_s:g}")
            pairs = Pairs(times.measured[scheme][link], times.predicted[scheme][link])
            row = reporter.add(name, "ttft_s", "s", "model", pairs)
            if scheme == "kvr_s":
                worst = max(worst, abs(1 / row.ratio - 1))
    bars.at_most(f"KVR-S off the model at any link, {num_tokens} tokens", worst, MODEL_BAR)
    console = Console(stderr=True, highlight=False)
    for one, other in RIVALS:
        measured = _over(times.measured[one], times.measured[other])
        predicted = _over(times.predicted[one], times.predicted[other])
        places = " and ".join(_place(bench.links_mb_s, ratios) for ratios in (measured, predicted))
        console.print(f"  {num_tokens} tokens: {one} and {other} cross, measured and by the model, at {places}")
        gap = disagreement(bench.links_mb_s, measured, predicted)
        bars.at_most(f"gap where {one} and {other} cross, {num_tokens} tokens", gap, MODEL_BAR)


def _over(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> list[float]:
    """Return the median ratio of the rounds for each link. Both sides of a round ran within seconds of each other."""
    links = zip(ours, theirs, strict=True)
    return [statistics.median(a / b for a, b in zip(*rounds, strict=True)) for rounds in links]


def _place(links_mb_s: Sequence[float], ratios: Sequence[float]) -> str:
    at = crossing(links_mb_s, ratios)
    if at is None:
        return f"no link ({'first' if ratios[0] < 1 else 'second'} faster throughout)"
    return f"{at:.1f} MB/s"


def run(args: argparse.Namespace) -> int:
    """Measure all prompt lengths on all links. Return 0, or 1 if `--bars` is given and a value misses its limit."""
    folder, cores = resolve(args), sorted(os.sched_getaffinity(0))[: args.ranks]
    lengths = [int(number) for number in (args.tokens or (QUICK_TOKENS if args.quick else TOKENS)).split(",")]
    reporter, bars = Reporter("slow_links", args.json), Bars()
    with Ranks.running(folder, args.dtype, [(core,) for core in cores]) as ranks:
        origin, bench = cpu_costs(ResolvedModel(folder), args.dtype, 1), _Bench(args, ranks, lengths)
        calibrated_at = QUICK_CALIBRATED if args.quick else CALIBRATED
        for seed in range(args.rounds):
            bench.round(seed, calibrated(ranks, origin, bench.kernel, calibrated_at).prefill)
        for num_tokens in lengths:
            report(reporter, bars, num_tokens, len(ranks), bench)
    reporter.close()
    if args.plot is not None:
        draw([bench.curve(num_tokens) for num_tokens in lengths], args.plot)
    return bars.close() if args.bars else 0


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", default=None, help=f"prompt lengths (default {TOKENS})")
    parser.add_argument("--links", default=None, help=f"bandwidths of the links in MB/s (default {LINKS})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="number of rounds of each scheme and link")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks of the chain, one core each")
    parser.add_argument("--kernel", default="native", help="attention kernel")
    parser.add_argument("--plot", type=Path, default=None, help="file for a plot (PNG)")
    parser.add_argument("--bars", action="store_true", help="exit with 1 when a bar is missed")
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
