"""Benchmark of the cost of other traffic on the links. Compares the prefill chain, all-gathers (TSP) and ring attention
on quiet and on disturbed links.

There are two kinds of disturbance. Both occur in random bursts, in both directions of every link, and are equal for all
schemes (`baselines.pacing`):

- `traffic`: on links of `--link` MB/s, other messages occupy the link for a fraction of the time
- `delay`: on links of full speed, a message that is sent during a burst is delivered only when the burst ends

Quiet and disturbed runs alternate. Output rows compare a scheme's disturbed time with its quiet time (`quiet`). In the
KV-Runahead paper (ICML 2024, figure 11), the chain lost at most 3.7 % and TSP over 10 %. With `--bars`, the benchmark
fails unless the chain's median loss is below 6 %. TSP's loss is only reported.
"""

import argparse
import dataclasses
import math
import os
import sys

from baton.planning.chain.partition import as_ranges
from baton.planning.chain.search import search
from baton.planning.cost_model import BATON, CostModel
from benchmarks.baselines.calibrating import LENGTHS as CALIBRATED
from benchmarks.baselines.calibrating import QUICK_LENGTHS as QUICK_CALIBRATED
from benchmarks.baselines.calibrating import at_pace, calibrated
from benchmarks.baselines.pacing import Pace
from benchmarks.baselines.rank_process import Task
from benchmarks.baselines.ranks import Ranks
from benchmarks.baselines.schemes import SCHEMES
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
from benchmarks.support.rates import runnable
from deploy.machine.planners import cpu_costs
from deploy.machine.resolved_model import ResolvedModel

LOSS_BAR = 0.06
"""Maximum median slowdown of the prefill chain by a disturbance, as a fraction of its time on quiet links."""
_BURST_S = {"traffic": 0.005, "delay": 0.010}
"""Mean duration of a burst in seconds, by kind of disturbance."""


def paces(kind: str, args: argparse.Namespace, seed: int) -> tuple[Pace, Pace]:
    """Return the simulated speed of a quiet link, and that of the same link when it is disturbed. `kind`: kind of
    disturbance, `traffic` (other messages) or `delay` (messages wait until a burst ends)."""
    quiet = Pace(bandwidth=args.link * 1e6 if kind == "traffic" else math.inf)
    return quiet, dataclasses.replace(quiet, busy_share=args.busy, burst_s=_BURST_S[kind], seed=seed)


class _Bench:
    """Prefill ranks, and measurements on them. Every method blocks."""

    def __init__(self, args: argparse.Namespace, ranks: Ranks, cost: CostModel, kernel: str) -> None:
        self._args, self._ranks, self._cost, self._kernel = args, ranks, cost, kernel
        self._pairs = args.pairs or (QUICK_PAIRS if args.quick else PAIRS)

    def measure(self, kind: str) -> dict[str, Pairs]:
        """Measure each scheme on disturbed and on quiet links. Return, by scheme, the seconds of each run as pairs
        (disturbed, quiet)."""
        num_tokens = self._args.tokens
        cost = at_pace(self._cost, self._ranks, paces(kind, self._args, seed=0)[0])
        chunks = as_ranges(search(num_tokens, len(self._ranks), cost, BATON), 0)
        found: dict[str, Pairs] = {name: Pairs([], []) for name in ("kvr_s", *SCHEMES)}
        with progress(kind, self._pairs + 1) as advance:
            for seed in range(self._pairs + 1):
                prompt = random_prompt(num_tokens, seed)
                quiet, disturbed = paces(kind, self._args, seed)
                for name, pairs in found.items():
                    parts = chunks if name == "kvr_s" else ()
                    task = Task("kvr" if name == "kvr_s" else name, prompt, parts, kernel=self._kernel, pace=quiet)
                    pairs.theirs.append(self._ranks.run(task).seconds)
                    pairs.ours.append(self._ranks.run(dataclasses.replace(task, pace=disturbed)).seconds)
                advance()
        return {name: Pairs(pairs.ours[1:], pairs.theirs[1:]) for name, pairs in found.items()}


def run(args: argparse.Namespace) -> int:
    """Measure both kinds of disturbance. Return 0, or 1 if `--bars` is given and a value misses its limit."""
    folder, cores = resolve(args), sorted(os.sched_getaffinity(0))[: args.ranks]
    reporter, bars, kernel = Reporter("noise", args.json), Bars(), runnable([args.kernel, "sdpa"])[0]
    with Ranks.running(folder, args.dtype, [(core,) for core in cores]) as ranks:
        origin, lengths = (
            cpu_costs(ResolvedModel(folder), args.dtype, 1),
            QUICK_CALIBRATED if args.quick else CALIBRATED,
        )
        bench = _Bench(args, ranks, calibrated(ranks, origin, kernel, lengths).prefill, kernel)
        for kind in _BURST_S:
            for scheme, pairs in bench.measure(kind).items():
                name = case(tokens=args.tokens, ranks=len(ranks), scheme=scheme, kernel=kernel, trace=kind)
                row = reporter.add(name, "ttft_s", "s", "quiet", pairs)
                if scheme == "kvr_s":
                    bars.at_most(f"KVR-S's loss by {kind}", 1 / row.ratio - 1, LOSS_BAR)
    reporter.close()
    return bars.close() if args.bars else 0


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=1024, help="number of tokens of the prompt")
    parser.add_argument("--link", type=float, default=100.0, help="bandwidth of the links with other traffic, in MB/s")
    parser.add_argument(
        "--busy", type=float, default=0.3, help="fraction of the time in which other traffic occupies the links"
    )
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks of the chain, one core each")
    parser.add_argument("--kernel", default="native", help="attention kernel")
    parser.add_argument("--pairs", type=int, default=0, help=f"rounds of each case; 0: {PAIRS}, or {QUICK_PAIRS} quick")
    parser.add_argument("--bars", action="store_true", help="exit with 1 when a bar is missed")
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
