"""Benchmark of the cost model at prompt lengths that are not in its calibration, and of the interpolation of chunk
sizes.

A chain prefills a prompt in chunks, one per rank. KVR-S searches the best chunk sizes for each prompt length. KVR-P
interpolates them between the prompt lengths of a table (knots), as a running cluster does. No measured length is a
knot.

Each round calibrates the cost model while all ranks are busy, then runs every length. Output rows: the measured times
of KVR-S and KVR-P, compared with the times that the calibration of the same round predicts (`model`), and KVR-P's time
compared with KVR-S's.

Before the rounds, the benchmark measures how much a rank is slowed down when the other ranks are busy too, compared
with one rank alone (`idle`). The ranks prefill separate prompts, multiply matrices that fit in cache, copy more data
than the caches hold, and run a layer's matrix products and attention. The results show which shared resource slows
ranks down: products in cache depend on a core's clock and units, and copies depend on memory bandwidth.
"""

import argparse
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from baton.planning.chain.partition import as_ranges
from baton.planning.chain.search import search
from baton.planning.chain.wavefront import chain_ttft
from baton.planning.cost_model import BATON
from baton.planning.hardware import ModelCosts
from baton.planning.planner import ChainPlanner
from baton.types import TokenRange
from benchmarks.baselines.calibrating import LENGTHS as CALIBRATED
from benchmarks.baselines.calibrating import QUICK_LENGTHS as QUICK_CALIBRATED
from benchmarks.baselines.calibrating import calibrated
from benchmarks.baselines.rank_process import Task
from benchmarks.baselines.ranks import Outcome, Ranks
from benchmarks.support.harness import (
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
from benchmarks.support.rates import RateProbe, runnable
from deploy.machine.planners import cpu_costs
from deploy.machine.resolved_model import ResolvedModel

TOKENS = "640,1200,2500,3600,5000"
QUICK_TOKENS = "300,600"
KVR_S, KVR_P = "kvr_s", "kvr_p"
"""Names of the two schemes for chunk sizes. KVR_S searches the sizes for each prompt length. KVR_P interpolates them
between the prompt lengths (knots) of a table of searched sizes."""
MODEL_BAR = 0.10
"""Maximum difference between the measured median and the predicted time, as a fraction of the predicted time."""
PREDICTED_BAR = 0.03
"""Maximum predicted slowdown of interpolated chunk sizes (KVR-P) compared with searched ones (KVR-S), as a fraction of
KVR-S's time."""
MEASURED_BAR = 0.06
"""Maximum measured slowdown of interpolated chunk sizes (KVR-P) compared with searched ones (KVR-S), as a fraction of
KVR-S's time."""
_MAX_TOKENS = 8192
"""Longest prompt in the table of chunk sizes, in tokens. The table's prompt lengths (knots) are this length divided
by powers of two."""
_SHARED_TOKENS = 1024
_QUICK_SHARED_TOKENS = 256
_PROBE_S = 0.5
_PROBES = (("cached", "gflops"), ("stream", "gb_s"), ("layer", "gflops"), ("attention", "gflops"))


@dataclass(frozen=True)
class _Run:
    """Measured prefill of one prompt, and the time that the cost model predicted for it."""

    outcome: Outcome
    predicted_s: float
    rank_s: Sequence[float]
    """Predicted computation time of each rank, in seconds."""


class _Bench:
    """Prefill ranks, and measurements on them. Every method blocks."""

    def __init__(self, args: argparse.Namespace, ranks: Ranks, origin: ModelCosts) -> None:
        self._ranks, self._origin, self._kernel = ranks, origin, runnable([args.kernel, "sdpa"])[0]
        self._num_rounds = args.pairs or (QUICK_PAIRS if args.quick else PAIRS)
        self._found: defaultdict[tuple[int, str], list[_Run]] = defaultdict(list)
        self._reporter, self._bars = Reporter("prediction", args.json), Bars()
        self._console = Console(stderr=True, highlight=False)
        self._shared_tokens = _QUICK_SHARED_TOKENS if args.quick else _SHARED_TOKENS

    def neighbours(self) -> None:
        """Measure and report how much a rank is slowed down when the other ranks are busy too."""
        whole = (TokenRange(0, self._shared_tokens),)
        alone, together = [], []
        with progress("neighbours", self._num_rounds + 1) as advance:
            for seed in range(self._num_rounds + 1):
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

    def rounds(self, lengths: Sequence[int], calibrated_at: Sequence[int]) -> None:
        """Run all rounds on prompts of `lengths` tokens, and report them. The cost model is calibrated on prompts of
        `calibrated_at` tokens."""
        for number in range(self._num_rounds):
            self._round(number, calibrated(self._ranks, self._origin, self._kernel, calibrated_at), lengths)
        for num_tokens in lengths:
            self._report(num_tokens)

    def _round(self, number: int, costs: ModelCosts, lengths: Sequence[int]) -> None:
        """Run KVR-S and KVR-P once for each length, and predict both with these costs."""
        width = len(self._ranks)
        planner = ChainPlanner(costs, max_ranks=width, max_tokens=_MAX_TOKENS)
        with progress(f"round {number + 1} of {self._num_rounds}", len(lengths)) as advance:
            for num_tokens in lengths:
                whole, prompt = TokenRange(0, num_tokens), random_prompt(num_tokens, number)
                chunks = {
                    KVR_S: as_ranges(search(num_tokens, width, costs.prefill, BATON), 0),
                    KVR_P: planner.chunks(whole, width),
                }
                for scheme, parts in chunks.items():
                    outcome = self._ranks.run(Task("kvr", prompt, parts, kernel=self._kernel))
                    predicted_s = float(chain_ttft([len(each) for each in parts], costs.prefill, BATON))
                    self._found[num_tokens, scheme].append(_Run(outcome, predicted_s, planner.rank_s(parts)))
                advance()

    def _report(self, num_tokens: int) -> None:
        """Report the rows and bars of one length, over all rounds."""
        searched, interpolated = self._found[num_tokens, KVR_S], self._found[num_tokens, KVR_P]
        self._say_by_rank(num_tokens, searched)
        keys = {"tokens": num_tokens, "ranks": len(self._ranks), "kernel": self._kernel}
        by_model = [
            self._reporter.add(
                case(**keys, scheme=scheme),
                "ttft_s",
                "s",
                "model",
                Pairs([run.outcome.seconds for run in runs], [run.predicted_s for run in runs]),
            )
            for scheme, runs in ((KVR_S, searched), (KVR_P, interpolated))
        ]
        times = Pairs([run.outcome.seconds for run in interpolated], [run.outcome.seconds for run in searched])
        row = self._reporter.add(case(**keys, scheme=KVR_P), "ttft_s", "s", KVR_S, times)
        off = abs(1 / by_model[0].ratio - 1)
        self._bars.at_most(f"off the prediction, {num_tokens} tokens", off, MODEL_BAR)
        pairs = zip(interpolated, searched, strict=True)
        behind = statistics.median(one.predicted_s / other.predicted_s for one, other in pairs) - 1
        self._bars.at_most(f"KVR-P slower than KVR-S by the model, {num_tokens} tokens", behind, PREDICTED_BAR)
        self._bars.at_most(f"KVR-P slower than KVR-S as measured, {num_tokens} tokens", 1 / row.ratio - 1, MEASURED_BAR)

    def _say_by_rank(self, num_tokens: int, runs: "Sequence[_Run]") -> None:
        """Print measured and predicted computation of each rank, and the waits of the last rank."""
        shares = []
        for rank in range(len(self._ranks)):
            compute_s = statistics.median(run.outcome.answers[rank].compute_s for run in runs)
            shares.append(f"{compute_s:.3f} ({statistics.median(run.rank_s[rank] for run in runs):.3f})")
        reports = [run.outcome.answers[-1].report for run in runs]
        wait_s = statistics.median(report.wait_s for report in reports if report is not None)
        computed = ", ".join(shares)
        text = f"{num_tokens} tokens: ranks compute {computed} s, predicted in brackets; the last waits {wait_s:.3f} s"
        self._console.print(f"  {text}", markup=False)

    def close(self, has_bars: bool) -> int:
        """Print the table of results and, if `has_bars` is true, whether each limit (bar) is met. Return the exit
        status."""
        self._reporter.close()
        return self._bars.close() if has_bars else 0

    def _rate(self, probe: RateProbe, num_busy: int) -> float:
        return self._ranks.rates(probe, num_busy)[0] / 1e9


def run(args: argparse.Namespace) -> int:
    """Measure the effect of busy neighbours, then run the rounds. Return 0, or 1 if `--bars` is given and a value
    misses its limit."""
    folder, cores = resolve(args), sorted(os.sched_getaffinity(0))[: args.ranks]
    lengths = [int(number) for number in (args.tokens or (QUICK_TOKENS if args.quick else TOKENS)).split(",")]
    with Ranks.running(folder, args.dtype, [(core,) for core in cores]) as ranks:
        bench = _Bench(args, ranks, cpu_costs(ResolvedModel(folder), args.dtype, 1))
        bench.neighbours()
        bench.rounds(lengths, QUICK_CALIBRATED if args.quick else CALIBRATED)
    return bench.close(args.bars)


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", default=None, help=f"prompt lengths (default {TOKENS})")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks of the chain, one core each")
    parser.add_argument("--kernel", default="native", help="attention kernel")
    parser.add_argument("--pairs", type=int, default=0, help=f"rounds; 0: {PAIRS}, or {QUICK_PAIRS} quick")
    parser.add_argument("--bars", action="store_true", help="exit with 1 when a bar is missed")
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
