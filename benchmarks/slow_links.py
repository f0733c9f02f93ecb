"""How long does a prompt take over slow links, and does the cost model know? From 200 down to 5 MB/s.

Two ranks, or more; their links, the chain's and the ring's alike, are held to a pace (`baselines.paced`). KVR-S's
chunks are searched anew for each link. Beside it even chunks, zigzag ring attention, and a chain of one rank, which
needs no link. The model is calibrated before, with all ranks busy, and each link by messages of its own. Rows: each
scheme's time beside the model's (`model`). Lastly where one scheme overtakes another, measured and predicted, and, with
--plot, both in a picture. `--bars`: KVR-S within 15 % of the model at every point, and no crossing missed by more than
that in time.
"""

import argparse
import dataclasses
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from baton.types import TokenRange
from benchmarks.baselines.pacing import Pace
from benchmarks.baselines.rank_process import Task
from benchmarks.baselines.ranks import Ranks
from benchmarks.calibrating import LENGTHS as CALIBRATED
from benchmarks.calibrating import QUICK_LENGTHS as QUICK_CALIBRATED
from benchmarks.calibrating import at_pace, calibrated
from benchmarks.crossings import crossing, disagreement
from benchmarks.harness import Bars, Pairs, Reporter, case, make_parser, progress, random_prompt, resolve
from benchmarks.rates import runnable
from benchmarks.slow_links_plot import Curve, draw
from deploy.calibrations import nominal_calibration
from planning.cost_model import BATON, CostModel, Link
from planning.partition import EvenPartitioner
from planning.peers import zigzag_ring
from planning.search import search
from planning.wavefront import chain_ttft

LINKS = "200,100,50,20,10,5"
QUICK_LINKS = "100,5"
TOKENS = "512,1024,2048"
QUICK_TOKENS = "256"
ROUNDS = 3
MODEL_BAR = 0.15
"""How far a time may be from the model's, as a fraction of it."""
RIVALS = (("even", "single"), ("zigzag", "single"), ("kvr_s", "single"), ("kvr_s", "zigzag"))
"""Whose crossings are looked for."""
SCHEMES = ("kvr_s", "even", "zigzag", "single")
_CURVE_POINTS = 40


@dataclass
class _Times:
    """One prompt length's seconds, at each link, slowest first."""

    links_mb_s: list[float] = field(default_factory=list)
    measured: dict[str, list[list[float]]] = field(default_factory=lambda: {name: [] for name in SCHEMES})
    """By scheme, at each link, each round."""
    predicted: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in SCHEMES})

    def medians(self, scheme: str) -> list[float]:
        return [statistics.median(rounds) for rounds in self.measured[scheme]]


def predict(num_tokens: int, num_ranks: int, cost: CostModel) -> dict[str, float]:
    """The model's seconds, by scheme."""
    even = EvenPartitioner().partition(TokenRange(0, num_tokens), num_ranks)
    return {
        "kvr_s": float(chain_ttft(search(num_tokens, num_ranks, cost, BATON), cost, BATON)),
        "even": float(chain_ttft([len(chunk) for chunk in even], cost, BATON)),
        "zigzag": zigzag_ring(num_tokens, num_ranks, cost),
        "single": float(chain_ttft([num_tokens], cost, BATON)),
    }


class _Bench:
    """The ranks, and what is found with them. Blocks in every method."""

    def __init__(self, args: argparse.Namespace, ranks: Ranks, cost: CostModel, kernel: str) -> None:
        self._ranks, self._kernel = ranks, kernel
        self._rounds = args.rounds
        numbers = sorted(float(each) for each in (args.links or (QUICK_LINKS if args.quick else LINKS)).split(","))
        self._costs = {mb_s: at_pace(cost, ranks, _pace(mb_s)) for mb_s in numbers}
        """By the link's pace, slowest first."""

    def measure(self, num_tokens: int) -> _Times:
        """One prompt length over all links."""
        times, width = _Times(), len(self._ranks)
        with progress(f"{num_tokens} tokens", len(self._costs) * self._rounds) as advance:
            single = self._seconds(num_tokens, Task("kvr", (), (TokenRange(0, num_tokens),), kernel=self._kernel))
            for mb_s, cost in self._costs.items():
                times.links_mb_s.append(mb_s)
                tasks = self._tasks(num_tokens, mb_s, cost)
                rounds: dict[str, list[float]] = {name: [] for name in tasks}
                for seed in range(self._rounds):
                    prompt = random_prompt(num_tokens, seed)
                    for name, task in tasks.items():
                        rounds[name].append(self._ranks.run(dataclasses.replace(task, token_ids=prompt)).seconds)
                    advance()
                for name, seconds in (rounds | {"single": single}).items():
                    times.measured[name].append(seconds)
                for name, predicted_s in predict(num_tokens, width, cost).items():
                    times.predicted[name].append(predicted_s)
        return times

    def curve(self, num_tokens: int, times: _Times) -> Curve:
        """For the plot: measured points, and the model's line over all bandwidths between."""
        low, high = times.links_mb_s[0], times.links_mb_s[-1]
        grid = [low * (high / low) ** (index / (_CURVE_POINTS - 1)) for index in range(_CURVE_POINTS)]
        fastest = self._costs[high]
        lines: dict[str, list[float]] = {name: [] for name in SCHEMES}
        for mb_s in grid:
            link = Link(fastest.link.latency_s, mb_s / high * fastest.link.bandwidth)
            predicted = predict(num_tokens, len(self._ranks), dataclasses.replace(fastest, link=link))
            for name, seconds in predicted.items():
                lines[name].append(seconds)
        return Curve(num_tokens, times.links_mb_s, times.measured, grid, lines)

    def _tasks(self, num_tokens: int, mb_s: float, cost: CostModel) -> dict[str, Task]:
        whole, width, pace = TokenRange(0, num_tokens), len(self._ranks), _pace(mb_s)
        searched, start = [], 0
        for chunk in search(num_tokens, width, cost, BATON):
            searched.append(TokenRange(start, start + chunk))
            start += chunk
        even = EvenPartitioner().partition(whole, width)
        return {
            "kvr_s": Task("kvr", (), tuple(searched), kernel=self._kernel, pace=pace),
            "even": Task("kvr", (), even, kernel=self._kernel, pace=pace),
            "zigzag": Task("zigzag", (), kernel=self._kernel, pace=pace),
        }

    def _seconds(self, num_tokens: int, task: Task) -> list[float]:
        """One scheme's rounds, after one that is not counted."""
        prompts = [random_prompt(num_tokens, seed) for seed in (self._rounds, *range(self._rounds))]
        return [self._ranks.run(dataclasses.replace(task, token_ids=prompt)).seconds for prompt in prompts][1:]


def _pace(mb_s: float) -> Pace:
    return Pace(bandwidth=mb_s * 1e6)


def report(reporter: Reporter, bars: Bars, num_tokens: int, num_ranks: int, times: _Times) -> None:
    """A row for each scheme and link, then the crossings."""
    worst = 0.0
    for scheme in SCHEMES:
        for index, mb_s in enumerate(times.links_mb_s):
            seconds, predicted_s = times.measured[scheme][index], times.predicted[scheme][index]
            name = case(tokens=num_tokens, ranks=num_ranks, scheme=scheme, link=f"{mb_s:g}")
            reporter.add(name, "ttft_s", "s", "model", Pairs(seconds, [predicted_s] * len(seconds)))
            if scheme == "kvr_s":
                worst = max(worst, abs(statistics.median(seconds) / predicted_s - 1))
    bars.at_most(f"KVR-S off the model at any link, {num_tokens} tokens", worst, MODEL_BAR)
    console = Console(stderr=True, highlight=False)
    for one, other in RIVALS:
        measured = _over(times.medians(one), times.medians(other))
        predicted = _over(times.predicted[one], times.predicted[other])
        places = " and ".join(_place(times.links_mb_s, ratios) for ratios in (measured, predicted))
        console.print(f"  {num_tokens} tokens: {one} and {other} cross, measured and by the model, at {places}")
        gap = disagreement(times.links_mb_s, measured, predicted)
        bars.at_most(f"gap where {one} and {other} cross, {num_tokens} tokens", gap, MODEL_BAR)


def _over(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def _place(links_mb_s: Sequence[float], ratios: Sequence[float]) -> str:
    at = crossing(links_mb_s, ratios)
    if at is None:
        return f"no link ({'first' if ratios[0] < 1 else 'second'} faster throughout)"
    return f"{at:.1f} MB/s"


def run(args: argparse.Namespace) -> int:
    """All lengths over all links; with --bars 1 when one is missed."""
    folder, cores = resolve(args), sorted(os.sched_getaffinity(0))[: args.ranks]
    lengths = [int(number) for number in (args.tokens or (QUICK_TOKENS if args.quick else TOKENS)).split(",")]
    reporter, bars, curves = Reporter("slow_links", args.json), Bars(), list[Curve]()
    kernel = runnable([args.kernel, "sdpa"])[0]
    with Ranks.running(folder, args.dtype, [(core,) for core in cores]) as ranks:
        calibrated_at = QUICK_CALIBRATED if args.quick else CALIBRATED
        calibration = calibrated(ranks, nominal_calibration(folder, args.dtype, 1), kernel, calibrated_at)
        bench = _Bench(args, ranks, calibration.cost, kernel)
        for num_tokens in lengths:
            times = bench.measure(num_tokens)
            report(reporter, bars, num_tokens, len(ranks), times)
            curves.append(bench.curve(num_tokens, times))
    reporter.close()
    if args.plot is not None:
        draw(curves, args.plot)
    return bars.close() if args.bars else 0


def main() -> int:
    """Runs the benchmark."""
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", default=None, help=f"prompt lengths (default {TOKENS})")
    parser.add_argument("--links", default=None, help=f"MB/s of the links (default {LINKS})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of each scheme over each link")
    parser.add_argument("--ranks", type=int, default=2, help="of the chain, one core each")
    parser.add_argument("--kernel", default="native", help="of attention")
    parser.add_argument("--plot", type=Path, default=None, help="PNG to write")
    parser.add_argument("--bars", action="store_true", help="exit with 1 when the promised does not hold")
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
