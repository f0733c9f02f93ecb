"""Does the cost model say how long a prompt takes, at lengths that it was not calibrated on? And does KVR-P lose much?

The model is calibrated with all ranks busy. KVR-S searches each length's chunks; KVR-P interpolates them between knots,
as served requests are divided, and no length lies on a knot. Rows: KVR-S's time beside the prediction (`model`), and
KVR-P's beside KVR-S's. Before that, what a busy neighbour costs: each rank prefills a prompt of its own, side by side
and alone (`idle`), and likewise multiplies within its cache, copies more than the caches hold, runs a layer's matrices
and attention. What slows down with the neighbour is what the ranks share: a core's clock and units where cached
matrices do, the way to memory where copies do.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Sequence

from rich.console import Console

from baton.types import TokenRange
from benchmarks.baselines.rank_process import Task
from benchmarks.baselines.ranks import Outcome, Ranks
from benchmarks.calibrating import LENGTHS as CALIBRATED
from benchmarks.calibrating import QUICK_LENGTHS as QUICK_CALIBRATED
from benchmarks.calibrating import calibrated
from benchmarks.harness import (
    PAIRS,
    QUICK_PAIRS,
    Bars,
    Pairs,
    Reporter,
    case,
    make_parser,
    progress,
    random_prompt,
    resolve,
)
from benchmarks.rates import RateProbe, runnable
from deploy.calibrations import nominal_calibration
from planning.calibration import Calibration
from planning.cost_model import BATON
from planning.planner import ChainPlanner
from planning.search import SearchedPartitioner
from planning.wavefront import chain_ttft

TOKENS = "640,1200,2500,3600,5000"
QUICK_TOKENS = "300,600"
MODEL_BAR = 0.10
"""How far the median may be from the prediction, as a fraction of it."""
PREDICTED_BAR = 0.03
"""How much longer KVR-P may take than KVR-S, by the model."""
MEASURED_BAR = 0.06
"""Likewise, measured."""
_MAX_TOKENS = 8192
"""Of the table that KVR-P interpolates; its knots are this divided by powers of two."""
_SHARED_TOKENS = 1024
_QUICK_SHARED_TOKENS = 256
_PROBE_S = 0.5
_PROBES = (("cached", "gflops"), ("stream", "gb_s"), ("layer", "gflops"), ("attention", "gflops"))


class _Bench:
    """The ranks, and what is found with them. Blocks in every method."""

    def __init__(self, args: argparse.Namespace, ranks: Ranks, origin: Calibration) -> None:
        self._ranks, self._origin, self._kernel = ranks, origin, runnable([args.kernel, "sdpa"])[0]
        self._pairs = args.pairs or (QUICK_PAIRS if args.quick else PAIRS)
        self._reporter, self._bars = Reporter("prediction", args.json), Bars()
        self._console = Console(stderr=True, highlight=False)
        self._shared_tokens = _QUICK_SHARED_TOKENS if args.quick else _SHARED_TOKENS

    def neighbours(self) -> None:
        """What a busy neighbour costs a rank."""
        whole = (TokenRange(0, self._shared_tokens),)
        alone, together = [], []
        with progress("neighbours", self._pairs + 1) as advance:
            for seed in range(self._pairs + 1):
                prompt = random_prompt(self._shared_tokens, seed)
                each = [Task("kvr", prompt, whole, (rank,), self._kernel) for rank in range(len(self._ranks))]
                alone.append(self._ranks.run(each[0]).answers[0].compute_s)
                together.append(self._ranks.run_each(each).answers[0].compute_s)
                advance()
        name = case(tokens=self._shared_tokens, ranks=len(self._ranks), kernel=self._kernel, policy="side_by_side")
        self._reporter.add(name, "ttft_s", "s", "idle", Pairs(together[1:], alone[1:]))
        for kind, metric in _PROBES:
            probe = RateProbe(kind, _PROBE_S, self._origin.shape, self._shared_tokens, self._kernel)
            rates = [(self._rate(probe, len(self._ranks)), self._rate(probe, 1)) for _ in range(QUICK_PAIRS)]
            pairs = Pairs([busy for busy, _ in rates], [idle for _, idle in rates])
            unit = "GB/s" if metric == "gb_s" else "GFLOP/s"
            self._reporter.add(case(policy=f"side_by_side_{kind}"), metric, unit, "idle", pairs)

    def length(self, num_tokens: int, calibration: Calibration, planner: ChainPlanner) -> None:
        """KVR-S and KVR-P of one length, beside the model and each other."""
        whole, width = TokenRange(0, num_tokens), len(self._ranks)
        searched = SearchedPartitioner(calibration.cost, BATON).partition(whole, width)
        chunks = {"kvr_s": searched, "kvr_p": planner.chunks(whole, width)}
        predicted = {
            name: float(chain_ttft([len(each) for each in parts], calibration.cost, BATON))
            for name, parts in chunks.items()
        }
        found: dict[str, list[Outcome]] = {name: [] for name in chunks}
        with progress(f"{num_tokens} tokens", self._pairs) as advance:
            for seed in range(self._pairs):
                prompt = random_prompt(num_tokens, seed)
                for name, parts in chunks.items():
                    found[name].append(self._ranks.run(Task("kvr", prompt, parts, kernel=self._kernel)))
                advance()
        self._say_by_rank(num_tokens, found["kvr_s"], planner.rank_s(searched))
        times = {name: [outcome.seconds for outcome in outcomes] for name, outcomes in found.items()}
        keys = {"tokens": num_tokens, "ranks": width, "kernel": self._kernel}
        for name, seconds in times.items():
            pairs = Pairs(seconds, [predicted[name]] * self._pairs)
            self._reporter.add(case(**keys, scheme=name), "ttft_s", "s", "model", pairs)
        row = self._reporter.add(
            case(**keys, scheme="kvr_p"), "ttft_s", "s", "kvr_s", Pairs(times["kvr_p"], times["kvr_s"])
        )
        off = abs(statistics.median(times["kvr_s"]) / predicted["kvr_s"] - 1)
        self._bars.at_most(f"off the prediction, {num_tokens} tokens", off, MODEL_BAR)
        behind = predicted["kvr_p"] / predicted["kvr_s"] - 1
        self._bars.at_most(f"KVR-P behind KVR-S by the model, {num_tokens} tokens", behind, PREDICTED_BAR)
        self._bars.at_most(f"KVR-P behind KVR-S measured, {num_tokens} tokens", 1 / row.ratio - 1, MEASURED_BAR)

    def _say_by_rank(self, num_tokens: int, outcomes: Sequence[Outcome], predicted_s: Sequence[float]) -> None:
        """Which part of a prediction holds: each rank's computation, or the waits."""
        shares = []
        for rank, rank_s in enumerate(predicted_s):
            compute_s = statistics.median(outcome.answers[rank].compute_s for outcome in outcomes)
            shares.append(f"{compute_s:.3f} ({rank_s:.3f})")
        waits = [outcome.answers[-1].report for outcome in outcomes]
        wait_s = statistics.median(report.wait_s for report in waits if report is not None)
        computed = ", ".join(shares)
        text = f"{num_tokens} tokens: ranks compute {computed} s, predicted in brackets; the last waits {wait_s:.3f} s"
        self._console.print(f"  {text}", markup=False)

    def close(self, has_bars: bool) -> int:
        """The table, the verdicts, and the exit code."""
        self._reporter.close()
        return self._bars.close() if has_bars else 0

    def calibrate(self, lengths: tuple[int, ...]) -> Calibration:
        """With all ranks busy."""
        return calibrated(self._ranks, self._origin, self._kernel, lengths)

    def _rate(self, probe: RateProbe, num_busy: int) -> float:
        return self._ranks.rates(probe, num_busy)[0] / 1e9


def run(args: argparse.Namespace) -> int:
    """Neighbours, calibration, all lengths; with --bars 1 when one is missed."""
    folder, cores = resolve(args), sorted(os.sched_getaffinity(0))[: args.ranks]
    lengths = [int(number) for number in (args.tokens or (QUICK_TOKENS if args.quick else TOKENS)).split(",")]
    with Ranks.running(folder, args.dtype, [(core,) for core in cores]) as ranks:
        bench = _Bench(args, ranks, nominal_calibration(folder, args.dtype, 1))
        bench.neighbours()
        calibration = bench.calibrate(QUICK_CALIBRATED if args.quick else CALIBRATED)
        planner = ChainPlanner(calibration, max_ranks=len(ranks), max_tokens=_MAX_TOKENS)
        for num_tokens in lengths:
            bench.length(num_tokens, calibration, planner)
    return bench.close(args.bars)


def main() -> int:
    """Runs the benchmark."""
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", default=None, help=f"prompt lengths (default {TOKENS})")
    parser.add_argument("--ranks", type=int, default=2, help="of the chain, one core each")
    parser.add_argument("--kernel", default="native", help="of attention")
    parser.add_argument("--pairs", type=int, default=0, help=f"rounds of each case; 0: {PAIRS}, or {QUICK_PAIRS} quick")
    parser.add_argument("--bars", action="store_true", help="exit with 1 when the promised does not hold")
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
