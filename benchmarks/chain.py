"""Is a chain the best way to prefill one prompt on several ranks? Against TSP, zigzag ring attention, and one process.

Ranks of one thread on a core each; all schemes use one decoder and one attention kernel, and are asked in turn. The
chain's partitions are even (`even`) and searched over a cost model (`kvr_s`), which is fitted to one rank's measured
prefills before; rows compare KVR-S with every other scheme, and its time with the model's prediction (`model`). The
baseline `single` is one process with as many threads as there are ranks.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.progress import track

from baton.types import TokenRange
from benchmarks.baselines.ranks import Ranks, Task
from benchmarks.baselines.schemes import SCHEMES
from benchmarks.harness import PAIRS, QUICK_PAIRS, Pairs, Reporter, case, make_parser, random_prompt, resolve
from modeling.config import ModelConfig
from modeling.weights import load_config
from planning.calibration import Calibration, calibrate
from planning.cost_model import BATON, Kernel
from planning.model_shape import ModelShape
from planning.partition import EvenPartitioner, Partitioner
from planning.search import SearchedPartitioner
from planning.wavefront import chain_ttft

LENGTHS = "512,1024,2048,6000"
QUICK_LENGTHS = "512"
CALIBRATED = (128, 384, 768, 1536, 3072, 5000)
QUICK_CALIBRATED = (128, 512, 1024)
_REPEATS = 3
_STDERR = Console(stderr=True)
_LINK_POINTS = ((2.0**16, 1e-4 + 2.0**16 / 2e9), (2.0**22, 1e-4 + 2.0**22 / 2e9))
"""gloo on the loopback: 0.1 ms and 2 GB/s, far from what decides here."""


def calibrated(ranks: Ranks, config: ModelConfig, lengths: Sequence[int]) -> Calibration:
    """Fits the cost model to whole prompts on the first rank alone; the best of three each."""
    points = []
    for num_tokens in track(lengths, "calibrating", transient=True, console=_STDERR):
        task = Task("kvr", random_prompt(num_tokens, 0), (TokenRange(0, num_tokens),))
        points.append((float(num_tokens), min(ranks.run(task)[0] for _ in range(_REPEATS))))
    shape = ModelShape(
        num_layers=config.num_layers,
        hidden=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        ffn=config.intermediate_size,
        vocab=config.vocab_size,
    )
    return calibrate(
        "measured", "this machine", shape, kernel=Kernel.CAUSAL, prefill_points=tuple(points), link_points=_LINK_POINTS
    )


def tasks_of(prompt: tuple[int, ...], partitioners: Mapping[str, Partitioner], num_ranks: int) -> dict[str, Task]:
    """One prompt, by every scheme."""
    whole = TokenRange(0, len(prompt))
    tasks = {name: Task(name, prompt) for name in SCHEMES}
    for name, partitioner in partitioners.items():
        tasks[name] = Task("kvr", prompt, partitioner.partition(whole, num_ranks))
    return tasks


def measure(args: argparse.Namespace) -> None:
    """All lengths, all schemes."""
    folder, pairs = resolve(args), QUICK_PAIRS if args.quick else PAIRS
    lengths = [int(n) for n in (args.tokens or (QUICK_LENGTHS if args.quick else LENGTHS)).split(",")]
    cores = sorted(os.sched_getaffinity(0))[: args.ranks]
    reporter = Reporter("chain", args.json)
    with (
        Ranks.running(folder, args.dtype, [(core,) for core in cores]) as ranks,
        Ranks.running(folder, args.dtype, [tuple(cores)]) as single,
    ):
        calibration = calibrated(ranks, load_config(folder), QUICK_CALIBRATED if args.quick else CALIBRATED)
        searched = SearchedPartitioner(calibration.cost, BATON)
        partitioners: dict[str, Partitioner] = {"even": EvenPartitioner(), "kvr_s": searched}
        for num_tokens in lengths:
            found: dict[str, list[float]] = {}
            for index in track(range(pairs + 1), f"{num_tokens} tokens", transient=True, console=_STDERR):
                prompt = random_prompt(num_tokens, seed=index)
                for name, task in tasks_of(prompt, partitioners, len(cores)).items():
                    found.setdefault(name, []).append(ranks.run(task)[0])
                alone = Task("kvr", prompt, (TokenRange(0, num_tokens),))
                found.setdefault("single", []).append(single.run(alone)[0])
            chunks = searched.partition(TokenRange(0, num_tokens), len(cores))
            report(reporter, num_tokens, chunks, found, calibration)
    reporter.close()


def report(
    reporter: Reporter,
    num_tokens: int,
    chunks: Sequence[TokenRange],
    found: Mapping[str, list[float]],
    calibration: Calibration,
) -> None:
    """KVR-S beside every other scheme, and beside what the model said."""
    name = case(tokens=num_tokens, ranks=len(chunks), scheme="kvr_s")
    ours = found["kvr_s"][1:]
    for baseline, seconds in found.items():
        if baseline != "kvr_s":
            reporter.add(name, "ttft_s", "s", baseline, Pairs(ours, seconds[1:]))
    predicted_s = float(chain_ttft([len(chunk) for chunk in chunks], calibration.cost, BATON))
    reporter.add(name, "ttft_s", "s", "model", Pairs(ours, [predicted_s] * len(ours)))


def main() -> int:
    """Runs the benchmark."""
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", default=None, help=f"prompt lengths (default {LENGTHS})")
    parser.add_argument("--ranks", type=int, default=2, help="of the chain, one core each")
    measure(parser.parse_args())
    return 0


if __name__ == "__main__":
    sys.exit(main())
