"""Measures the duration of a generation step, and compares it with its lower bound, with the roofline's prediction, and
with another server.

The cases (cells) are pairs of a batch size and a context length. The sequences of a batch have different lengths,
evenly spread from 10 % below to 10 % above the context length. Their KV is stored as in a served request. A step is one
step of the engine, including sampling and detokenization (`benchmarks.sides.engine_rows`).

If `--peer-python` is given, Baton is compared with vLLM-CPU (benchmarks/peers). vLLM's engine runs steps of sequences
with the same lengths in a separate process; `--peer-model` is the folder of vLLM's model. Otherwise Baton is compared
with transformers (`plain`). Baton and the other system alternate. Each time, a system runs one warm-up step and four
measured steps, while the other one is idle.

`floor` is the number of bytes that a step must read, as counted by the engine, divided by the bandwidth with which all
threads read memory. `operations` is the sum over matrices and attention of max(time to read, time to compute), with
rates that are measured before the first case. `roofline` is the prediction of `baton plan --hardware here` from rates
that are measured at the same time.

`--plot` draws floor and roofline with the measured steps. If `--bars` is given, the benchmark fails if a measured step
takes too long compared with vLLM's step or with `operations`, or if `roofline` differs too much from the measured step.
"""

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.weight_sizes import bytes_per_step
from baton.modeling.hosting import use_cores
from baton.modeling.kv.buffers import TORCH_DTYPES
from baton.planning.chips import Chip
from baton.process.garbage import collect_rarely
from baton.types import WEIGHT_FORMS
from baton_lab.study.roofline import ServedModel, served, step_time
from benchmarks.sides.engine_rows import EngineRows, row_lengths
from benchmarks.sides.vllm_peer import VllmPeer
from benchmarks.support.harness import (
    PAIRS,
    QUICK_PAIRS,
    Bars,
    Pairs,
    Reporter,
    case,
    interleave,
    make_parser,
    peer_folder,
    resolve,
)
from deploy.machine.prefill_rates import layer_work, rate_of
from deploy.machine.probe import measure
from deploy.machine.resolved_model import ResolvedModel
from deploy.machine.this_machine import inspect_machine
from generate_workers.config import EngineConfig
from generate_workers.engine.status import StepStats

GRID = "1x192,16x192,32x192,16x1024,8x4096,16x4096"
QUICK_GRID = "1x192,4x512"
BARS = {(1, 192): 1.15, (16, 192): 0.85, (32, 192): 0.85, (16, 1024): 0.75, (8, 4096): 0.75, (16, 4096): 0.75}
"""Maximum ratio of Baton's step time to vLLM's, by (batch size, context length in tokens). With --bars, the benchmark
fails above it."""
INT8_BARS = BARS | {(1, 192): 0.65}
"""Maximum ratio of Baton's step time with --weights int8 to vLLM's step time with bf16 weights, by (batch size, context
length in tokens)."""
OPERATIONS_BAR = 1.5
"""Maximum ratio of Baton's step time to its lower bound by operations: the sum over the step's matrix products and
attention of max(time to read, time to compute)."""
PREDICTION_BAR = 0.20
"""Maximum error of the predicted step time, as a fraction of the measured step time."""
_STEPS = 4
_PEER_KV_GB = 3
_PROMPT_TOKENS = 256
_RATE_S = 1.0


@dataclass(frozen=True)
class Cell:
    """One case of the benchmark: a batch size and a context length in tokens."""

    batch: int
    context: int

    @classmethod
    def parse(cls, text: str) -> "Cell":
        """Parse a case from text: batch size and context length in tokens, for example `16x192`."""
        batch, context = map(int, text.split("x"))
        return cls(batch, context)

    def lengths(self, num_rounds: int) -> list[int]:
        """Return the initial number of tokens of each sequence for a measurement of `num_rounds` rounds. Sequences
        grow in each round. The initial lengths are chosen so that the mean length is `context` half-way through the
        rounds."""
        return row_lengths(self.batch, self.context, less=num_rounds * (_STEPS + 1) // 2)


@dataclass(frozen=True)
class Outcome:
    """Measured and predicted times of one case."""

    cell: Cell
    pairs: Pairs
    stats: StepStats
    floor_ms: float
    operations_ms: float
    predicted_ms: float


def plain_step(folder: Path, dtype: torch.dtype, lengths: list[int]) -> Callable[[], float]:
    """Return a function that runs steps of transformers and returns the milliseconds of a step. It uses SDPA and a
    dynamic cache, which is cropped after each step.

    All sequences have the mean of `lengths` as their length, because transformers would pad shorter sequences.
    """
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    config, batch = model.config, len(lengths)
    cache = DynamicCache(config=config)
    context = round(statistics.mean(lengths))
    shape = (batch, config.num_key_value_heads, context, config.hidden_size // config.num_attention_heads)
    for layer in range(config.num_hidden_layers):
        cache.update(torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype), layer)
    ids = torch.ones(batch, 1, dtype=torch.long)

    def step() -> None:
        model(ids, past_key_values=cache, use_cache=True).logits.argmax(-1)
        cache.crop(-1)

    def step_ms() -> float:
        with torch.inference_mode():
            step()
            start_s = time.perf_counter()
            for _ in range(_STEPS):
                step()
        return (time.perf_counter() - start_s) / _STEPS * 1e3

    return step_ms


def peer_step(peer: VllmPeer, lengths: list[int]) -> Callable[[], float]:
    """Return a function that runs steps of vLLM and returns the mean milliseconds of a step. `lengths`: number of
    tokens of each sequence before the first step."""
    peer.ask({"rows": lengths})

    def step_ms() -> float:
        times = peer.ask({"steps": _STEPS + 1})["step_ms"]
        assert isinstance(times, list)
        return statistics.mean(float(each) for each in times[1:])

    return step_ms


def bare(chip: Chip, prompt_flops: float) -> Chip:
    """Return a copy of `chip` from which lower bounds of step times can be computed. With this copy, `step_time`
    predicts that each operation takes max(time to read, time to compute). The compute rate is max(`chip.flops`,
    `prompt_flops`), in FLOP/s. KV is read at the full memory bandwidth."""
    return Chip(max(chip.flops, prompt_flops), chip.memory_bandwidth, chip.memory_bytes)


class Bench:
    """Decoder, measured rates of the machine, and options, which all cases share."""

    def __init__(self, args: argparse.Namespace, folder: Path, num_threads: int) -> None:
        self._args, self._folder = args, folder
        self.num_rounds = 1 + (args.pairs or (QUICK_PAIRS if args.quick else PAIRS))
        self.decoder: Decoder = load_decoder(folder, dtype=args.dtype, weights=args.weights)
        shape = ResolvedModel(folder).shape(args.dtype)
        memory_bytes = inspect_machine().available_bytes
        self.measured = measure(shape, args.dtype, num_threads, memory_bytes, weights=args.weights)
        self.chip: Chip = self.measured.chip
        work = layer_work(shape, _PROMPT_TOKENS, TORCH_DTYPES[args.dtype])
        self.bare_chip = bare(self.chip, rate_of(work, _RATE_S))
        self.model: ServedModel = served(
            shape,
            tied=self.decoder.config.tie_embeddings,
            weight_bytes=bytes_per_step(self.decoder.weights) / shape.step_weights,
            kv_bytes=shape.dtype_bytes,
        )
        collect_rarely()  # as workers do

    def run(self, cell: Cell, peer: VllmPeer | None) -> Outcome:
        """Measure the steps of Baton and of the other server in one case. With --alone, measure only Baton."""
        lengths = cell.lengths(self.num_rounds)
        max_steps = self.num_rounds * (_STEPS + 1) + 1
        config = EngineConfig(num_slots=cell.batch, max_slot_tokens=max(lengths) + max_steps + 1)
        with EngineRows.running(self.decoder, self._folder, lengths, max_steps, config) as rows:

            def ours() -> float:
                return rows.step_ms(_STEPS)

            if self._args.alone:
                times = [ours() for _ in range(self.num_rounds)][1:]
                pairs = Pairs(times, times)
            else:
                pairs = interleave(ours, self._theirs(peer, lengths), self.num_rounds - 1)
            stats = rows.last
        floor_s = stats.num_bytes / self.chip.memory_bandwidth
        operations, predicted = (
            step_time(self.model, chip, batch=cell.batch, context=cell.context) for chip in (self.bare_chip, self.chip)
        )
        return Outcome(cell, pairs, stats, floor_s * 1e3, operations.total_s * 1e3, predicted.total_s * 1e3)

    def _theirs(self, peer: VllmPeer | None, lengths: list[int]) -> Callable[[], float]:
        if peer is not None:
            return peer_step(peer, lengths)
        return plain_step(resolve(self._args, dequantised=True), self.decoder.dtype, lengths)


def report(outcome: Outcome, name: str, baseline: str, reporter: Reporter, bars: Bars) -> None:
    """Report the results of a case and check them against the required values. `baseline`: name of the server that
    Baton is compared with; empty if there is none."""
    ours, cell = outcome.pairs.ours, outcome.cell
    if baseline:
        reporter.add(name, "step_ms", "ms", baseline, outcome.pairs)
        bar = (INT8_BARS if "dtype=int8" in name else BARS).get((cell.batch, cell.context))
        if baseline == "vllm" and bar is not None:
            bars.at_most(
                f"{cell.batch} x {cell.context}, of vLLM's step",
                1 / outcome.pairs.quartiles(smaller_is_better=True)[1],
                bar,
            )
    others = {"floor": outcome.floor_ms, "operations": outcome.operations_ms, "roofline": outcome.predicted_ms}
    for other, value in others.items():
        reporter.add(name, "step_ms", "ms", other, Pairs(ours, [value] * len(ours)))
    kv_bytes, weight_bytes = float(outcome.stats.num_kv_bytes), float(outcome.stats.num_weight_bytes)
    reporter.add(name, "kv_bytes", "bytes", "weights", Pairs([kv_bytes], [weight_bytes]))
    measured = outcome.pairs.our_median
    over = measured / outcome.operations_ms
    bars.at_most(f"{cell.batch} x {cell.context}, of its operations' time", over, OPERATIONS_BAR)
    off = abs(outcome.predicted_ms / measured - 1)
    bars.at_most(f"{cell.batch} x {cell.context}, the prediction is off by", off, PREDICTION_BAR)
    Console(stderr=True, highlight=False).print(
        f"  {cell.batch} x {cell.context}: KV {kv_bytes / 1e6:.1f} MB, weights {weight_bytes / 1e6:.1f} MB, floor"
        f" {outcome.floor_ms:.1f} ms; measured {measured:.1f} ms, {measured / outcome.floor_ms:.2f} x the floor;"
        f" predicted {outcome.predicted_ms:.1f} ms, {outcome.predicted_ms / measured:.2f} x measured",
        soft_wrap=True,
    )


@contextlib.contextmanager
def running_peer(args: argparse.Namespace, cores: list[int]) -> Iterator[VllmPeer | None]:
    """Start vLLM if the options name it, and yield it. Otherwise yield None."""
    if args.peer_python is None:
        yield None
        return
    settings = {"VLLM_CPU_KVCACHE_SPACE": str(_PEER_KV_GB), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with VllmPeer.running(args.peer_python, peer_folder(args), cores, settings) as peer:
        Console(stderr=True, highlight=False).print(f"  peer: vLLM {peer.version}, {len(cores)} threads")
        yield peer


def run(args: argparse.Namespace) -> int:
    """Measure all cases. Return 0, or 1 if `--bars` is given and a value misses its limit."""
    cores = sorted(os.sched_getaffinity(0))
    cores = cores[: args.threads or len(cores)]
    use_cores(cores, len(cores))
    folder = resolve(args)
    reporter, bars = Reporter("decode", args.json), Bars()
    bench = Bench(args, folder, len(cores))
    Console(stderr=True, highlight=False).print(f"  this machine: {bench.chip} {bench.measured.doubt}", soft_wrap=True)
    outcomes = []
    with running_peer(args, cores) as peer:
        baseline = "" if args.alone else "vllm" if peer is not None else "plain"
        for cell in map(Cell.parse, (args.grid or (QUICK_GRID if args.quick else GRID)).split(",")):
            outcomes.append(bench.run(cell, peer))
            name = case(
                batch=cell.batch, context=cell.context, dtype=args.dtype, weights=args.weights, threads=len(cores)
            )
            report(outcomes[-1], name, baseline, reporter, bars)
    reporter.close()
    if args.plot is not None:
        from benchmarks.plots.decode import Step, draw

        measured = [Step(each.cell.batch, each.cell.context, each.pairs.our_median) for each in outcomes]
        draw(measured, bench.model, bench.chip, args.plot)
    return bars.close() if args.bars else 0


def main() -> int:
    """Run the benchmark from the command line. Return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--grid", default=None, help=f"batch x context cases (default {GRID})")
    parser.add_argument("--weights", default="stored", choices=WEIGHT_FORMS, help="form of Baton's weights in memory")
    parser.add_argument(
        "--threads", type=int, default=0, help="number of threads per side, one core each; 0: all cores"
    )
    parser.add_argument("--peer-python", type=Path, default=None, help="Python of vLLM's environment")
    parser.add_argument("--peer-model", type=Path, default=None, help="Hugging Face folder for vLLM; default: Baton's")
    parser.add_argument("--alone", action="store_true", help="measure Baton only")
    parser.add_argument("--pairs", type=int, default=0, help=f"rounds; 0: {PAIRS}, or {QUICK_PAIRS} with --quick")
    parser.add_argument("--bars", action="store_true", help="exit with 1 when a bar is missed")
    parser.add_argument("--plot", type=Path, default=None, help="draw measured steps, roofline and floor (PNG)")
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
