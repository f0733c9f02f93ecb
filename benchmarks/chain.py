"""Compares the chain with other schemes that prefill one prompt: tensor-and-sequence parallel prefill (TSP), zigzag
ring attention, and one process.

Each rank has one thread on its own core. All schemes use the same decoder and attention kernel, and are measured
alternately. The chunks of the chain have equal lengths (`even`), or their lengths are searched with a cost model
(KVR-S, `kvr_s`). The cost model is calibrated first, while all ranks are busy.

Each output row compares the time of KVR-S with that of one other scheme, or with the time that the cost model predicts
for KVR-S (`model`). The scheme `single` is one process with one thread per rank. If `--bars` is given, only the cases
that have a limit are measured, and the benchmark fails if a ratio misses its limit.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.planning.chain.partition import as_ranges
from baton.planning.chain.search import search
from baton.planning.chain.wavefront import chain_ttft
from baton.planning.cost_model import BATON
from baton.planning.hardware import ModelCosts
from baton.types import TokenRange
from baton_lab.study.comparison import even_partition
from benchmarks.baselines.calibrating import LENGTHS as CALIBRATED
from benchmarks.baselines.calibrating import QUICK_LENGTHS as QUICK_CALIBRATED
from benchmarks.baselines.calibrating import calibrated
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

TOKENS = "512,1024,2048,6000"
QUICK_TOKENS = "512"
SCHEME_NAMES = (*SCHEMES, "even", "single")
BAR_TOKENS = "2048,6000"
BAR_SCHEMES = ("tsp_dense", "zigzag")
TSP_BARS = {2048: 1.35, 6000: 1.65}
"""Minimum ratio of the time of dense tensor-and-sequence parallel prefill (TSP) to that of a chain with searched chunk
lengths (KVR-S), by prompt length in tokens. Applies to measurements with the SDPA kernel. Checked with --bars."""
ZIGZAG_BAR = 0.97
"""Minimum ratio of zigzag ring attention's time to that of a chain with searched chunk lengths (KVR-S), for every
length and kernel. Checked with --bars."""


@dataclass(frozen=True)
class Contest:
    """One case of the benchmark: a prompt length, an attention kernel, and the schemes that are compared with KVR-S."""

    num_tokens: int
    kernel: str
    schemes: tuple[str, ...]
    pairs: int


class Arena:
    """Processes that are compared (the ranks, and the single process) and one cost model for each attention kernel.
    Every method blocks."""

    def __init__(self, ranks: Ranks, single: Ranks | None, costs: Mapping[str, ModelCosts]) -> None:
        self._ranks, self._single, self._costs = ranks, single, costs

    def measure(self, contest: Contest) -> dict[str, list[float]]:
        """Measure one case, after a short warm-up round. Return the seconds of each round by scheme. The key `model`
        has the seconds that the cost model predicts for KVR-S."""
        found: dict[str, list[float]] = {name: [] for name in ("kvr_s", *contest.schemes)}
        self._round(contest, min(contest.num_tokens, 512), seed=contest.pairs)
        with progress(f"{contest.num_tokens} tokens, {contest.kernel}", contest.pairs) as advance:
            for seed in range(contest.pairs):
                for name, seconds in self._round(contest, contest.num_tokens, seed).items():
                    found[name].append(seconds)
                advance()
        chunks = [len(chunk) for chunk in self.searched(contest.num_tokens, contest.kernel)]
        predicted_s = float(chain_ttft(chunks, self._costs[contest.kernel].prefill, BATON))
        return found | {"model": [predicted_s] * contest.pairs}

    def searched(self, num_tokens: int, kernel: str) -> tuple[TokenRange, ...]:
        """Return the chunk of each rank for a prompt of `num_tokens` tokens. The chunk lengths are searched (KVR-S)."""
        return as_ranges(search(num_tokens, len(self._ranks), self._costs[kernel].prefill, BATON), 0)

    def _round(self, contest: Contest, num_tokens: int, seed: int) -> dict[str, float]:
        prompt, kernel, whole = random_prompt(num_tokens, seed), contest.kernel, TokenRange(0, num_tokens)
        tasks = {name: Task(name, prompt, kernel=kernel) for name in contest.schemes if name in SCHEMES}
        tasks["kvr_s"] = Task("kvr", prompt, self.searched(num_tokens, kernel), kernel=kernel)
        if "even" in contest.schemes:
            tasks["even"] = Task("kvr", prompt, even_partition(whole, len(self._ranks)), kernel=kernel)
        times = {name: self._ranks.run(task).seconds for name, task in tasks.items()}
        if "single" in contest.schemes:
            assert self._single is not None
            times["single"] = self._single.run(Task("kvr", prompt, (whole,), kernel=kernel)).seconds
        return times


def contests(args: argparse.Namespace, kernels: Sequence[str]) -> list[Contest]:
    """Return the cases to measure, in ascending order of prompt length. `kernels`: names of the attention kernels to
    measure."""
    default = BAR_TOKENS if args.bars else QUICK_TOKENS if args.quick else TOKENS
    schemes = BAR_SCHEMES if args.bars else tuple(name for name in SCHEME_NAMES if name in args.schemes.split(","))
    pairs = args.pairs or (QUICK_PAIRS if args.quick else PAIRS)
    lengths = sorted(int(number) for number in (args.tokens or default).split(","))
    return [Contest(num_tokens, kernel, schemes, pairs) for num_tokens in lengths for kernel in kernels]


def run(args: argparse.Namespace) -> int:
    """Measure all prompt lengths, kernels and schemes. Return 1 if a required ratio is missed, otherwise 0."""
    folder, cores = resolve(args), sorted(os.sched_getaffinity(0))[: args.ranks]
    origin, kernels = cpu_costs(ResolvedModel(folder), args.dtype, 1), runnable(args.kernel.split(","))
    planned, bars, reporter = contests(args, kernels), Bars(), Reporter("chain", args.json)
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(Ranks.running(folder, args.dtype, [(core,) for core in cores]))
        single = None
        if any("single" in contest.schemes for contest in planned):
            single = stack.enter_context(Ranks.running(folder, args.dtype, [tuple(cores)]))
        lengths = QUICK_CALIBRATED if args.quick else CALIBRATED
        arena = Arena(ranks, single, {kernel: calibrated(ranks, origin, kernel, lengths) for kernel in kernels})
        for contest in planned:
            report(reporter, contest, len(cores), arena.measure(contest), bars if args.bars else None)
    reporter.close()
    return bars.close()


def report(
    reporter: Reporter, contest: Contest, num_ranks: int, found: Mapping[str, list[float]], bars: Bars | None
) -> None:
    """Report the results of one case: KVR-S compared with every other scheme, and with the cost model's prediction.
    `found`: seconds of each round by scheme. `bars`: checks of the required ratios; None: no checks."""
    num_tokens, kernel = contest.num_tokens, contest.kernel
    name = case(tokens=num_tokens, ranks=num_ranks, scheme="kvr_s", kernel=kernel)
    for baseline, seconds in found.items():
        if baseline == "kvr_s":
            continue
        row = reporter.add(name, "ttft_s", "s", baseline, Pairs(found["kvr_s"], seconds))
        what = f"KVR-S over {baseline}, {num_tokens} tokens, {kernel}"
        if bars is not None and baseline == "tsp_dense" and kernel == "sdpa" and num_tokens in TSP_BARS:
            bars.at_least(what, row.ratio, TSP_BARS[num_tokens])
        if bars is not None and baseline == "zigzag":
            bars.at_least(what, row.ratio, ZIGZAG_BAR)


def main() -> int:
    """Run the benchmark from the command line. Return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", default=None, help=f"prompt lengths (default {TOKENS}; {BAR_TOKENS} with --bars)")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks of the chain, one core each")
    parser.add_argument("--kernel", default="native,sdpa", help="attention kernels, for all schemes")
    parser.add_argument(
        "--schemes", default=",".join(SCHEME_NAMES), help="schemes to compare with, unless --bars is given"
    )
    parser.add_argument("--pairs", type=int, default=0, help=f"rounds of each case; 0: {PAIRS}, or {QUICK_PAIRS} quick")
    parser.add_argument("--bars", action="store_true", help="measure only the cases that have bars")
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
