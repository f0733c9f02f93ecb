"""Benchmark of the automatic choice between kernels for linear layers. Measures decode steps of few sequences, and long
prefills.

Three sides are measured alternately. Each runs the whole decoder in its own process:

- `panels`: linear layers run on Baton's C++ kernels for any number of rows of the input matrix
- `torch`: linear layers run on torch for any number of rows
- `chosen`: `baton.modeling.kernels.choosing` measures both at the start, and the result selects the kernel

Steps are those of a generation engine (`benchmarks.sides.engine_rows`) on all cores. A prefill is one forward pass of
the decoder on one thread, as in a prefill rank.

`--without-amx` disables AMX in Baton's kernels but not in torch, which is then faster for many rows. To disable AMX in
torch too, set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment.

The baseline of an output row is the faster of `panels` and `torch` in the same case. With `--bars`, the benchmark fails
if `chosen` takes more than 1.10 times as long.
"""

import argparse
import contextlib
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from rich.console import Console

from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.forward.decoder import Decoder
from baton.modeling.kernels.choosing import measure_choice
from baton.modeling.kernels.process_kernels import KERNELS
from baton.modeling.kv.buffers import BufferSpan, KvBuffer
from baton.process.garbage import collect_rarely
from baton.types import KernelChoice, TokenRange
from benchmarks.sides.engine_rows import EngineRows, row_lengths
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
from generate_workers.config import EngineConfig

STEPS = "1x192,16x192,32x192,16x1024,8x4096"
PREFILLS = "100,1200"
QUICK_STEPS, QUICK_PREFILLS = "1x192,16x192", "100"
BAR = 1.10
"""Maximum ratio of the time with automatic choice (`chosen`) to that with the faster kernel (`panels` or `torch`)."""
SIDES = ("chosen", "panels", "torch")
_NUM_STEPS = 4
_END_S = 10.0


@dataclass(frozen=True)
class SideSpec:
    """Arguments of the process of one side of the comparison. `name` is `panels` (linear layers always run on Baton's
    kernels), `torch` (always on torch), or `chosen` (on the kernel that was measured to be faster)."""

    name: str
    folder: Path
    dtype: str
    tiles: bool
    """True if Baton's kernels may use the processor's AMX instructions."""

    def choice(self) -> KernelChoice:
        """Return which kernel runs a linear layer, Baton's or torch's, by the number of rows of the layer's input. The
        side `chosen` measures which kernel is faster. The side `panels` always uses Baton's kernel, and the side
        `torch` always uses torch's kernel."""
        chosen = measure_choice(tiles=self.tiles)
        if self.name == "panels":
            return replace(chosen, torch_rows=None)
        if self.name == "torch":
            return replace(chosen, torch_rows=1)
        return chosen


@dataclass(frozen=True)
class Cell:
    """One measured case. If `batch` is not 0, the case is a decode step of `batch` sequences with `context` keys each.
    If `batch` is 0, it is a prefill of `context` tokens."""

    batch: int
    context: int
    num_runs: int
    """Number of runs of each side of the comparison (`chosen`, `panels`, `torch`). The first run is a warm-up run."""

    @property
    def num_threads(self) -> int:
        return len(os.sched_getaffinity(0)) if self.batch else 1

    @property
    def name(self) -> str:
        if self.batch:
            return case(batch=self.batch, context=self.context, threads=self.num_threads)
        return case(tokens=self.context, threads=1)


class Side:
    """Connection to the process of one side of the comparison. Create with `running`."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.choice: KernelChoice = pipe.recv()

    @classmethod
    @contextlib.contextmanager
    def running(cls, spec: SideSpec) -> Iterator["Side"]:
        """Context manager. Start the process of one side of the comparison, and yield the connection to it when it is
        ready. The process ends with the block."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_run, args=(theirs, spec), daemon=True)
        process.start()
        theirs.close()  # so that `recv` on our end fails when the process dies
        try:
            yield cls(ours)
        finally:
            ours.close()  # this ends the process's loop
            process.join(_END_S)
            process.kill()

    def begin(self, cell: Cell) -> None:
        """Send a case to the process, which sets it up in place of the previous case."""
        self._ask(cell)

    def run_ms(self) -> float:
        """Run one step or one prefill of the current case in the process. Return the milliseconds that it took."""
        return self._ask(None)

    def _ask(self, question: Cell | None) -> float:
        self._pipe.send(question)
        answer = self._pipe.recv()
        assert isinstance(answer, float)
        return answer


def _run(pipe: Connection, spec: SideSpec) -> None:
    """Run a side's process: set up cells and measure them until the pipe is closed."""
    pipe.send(KERNELS.use((spec.choice(),)))
    decoder = load_decoder(spec.folder, dtype=spec.dtype)
    collect_rarely()
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt), ExitStack() as stack:
        timed = None
        while True:
            cell = pipe.recv()
            if cell is not None:
                stack.close()
                torch.set_num_threads(cell.num_threads)
                timed = _Steps(stack, decoder, spec.folder, cell) if cell.batch else _Prefill(decoder, cell)
                pipe.send(0.0)
            else:
                assert timed is not None
                pipe.send(timed.run_ms())


class _Steps:
    """Measures steps of a generation engine."""

    def __init__(self, stack: ExitStack, decoder: Decoder, folder: Path, cell: Cell) -> None:
        max_steps = cell.num_runs * (_NUM_STEPS + 1) + 1
        lengths = row_lengths(cell.batch, cell.context, less=max_steps // 2)
        config = EngineConfig(num_slots=cell.batch, max_slot_tokens=max(lengths) + max_steps + 1)
        self._rows = stack.enter_context(EngineRows.running(decoder, folder, lengths, max_steps, config))

    def run_ms(self) -> float:
        return self._rows.step_ms(_NUM_STEPS)


class _Prefill:
    """Measures the time of a prefill: one forward pass of a whole prompt."""

    def __init__(self, decoder: Decoder, cell: Cell) -> None:
        self._decoder = decoder
        self._ids = random_prompt(cell.context, seed=0)
        tokens = TokenRange(0, cell.context)
        self._span = BufferSpan(KvBuffer(decoder.layout, tokens), tokens)

    @torch.inference_mode()
    def run_ms(self) -> float:
        start_s = time.perf_counter()
        hidden_TD = self._decoder.forward(self._ids, [self._span])
        self._decoder.logits(hidden_TD[-1:])
        return (time.perf_counter() - start_s) * 1e3


def measure(sides: dict[str, Side], cell: Cell, reporter: Reporter, bars: Bars) -> None:
    """Measure all sides alternately on one case. Report `chosen` compared with the faster of the two sides that always
    use one kernel."""
    for side in sides.values():
        side.begin(cell)
    times: dict[str, list[float]] = {name: [] for name in sides}
    with progress(cell.name, cell.num_runs) as advance:
        for number in range(cell.num_runs):
            for name, side in sides.items():
                run_ms = side.run_ms()
                if number:  # the first run fills caches
                    times[name].append(run_ms)
            advance()
    ours = times.pop("chosen")
    better = min(times, key=lambda name: statistics.median(times[name]))
    for name, theirs in times.items():
        row = reporter.add(cell.name, "step_ms" if cell.batch else "prefill_ms", "ms", name, Pairs(ours, theirs))
        if name == better:
            bars.at_most(f"{cell.name}, of the time of {name}", 1 / row.ratio, BAR)


def run(args: argparse.Namespace) -> int:
    """Measure all cases. Return 0, or 1 if `--bars` is given and a value misses its limit."""
    folder, reporter, bars = resolve(args), Reporter("kernels", args.json), Bars()
    num_runs = 1 + (args.pairs or (QUICK_PAIRS if args.quick else PAIRS))
    steps = args.steps or (QUICK_STEPS if args.quick else STEPS)
    prefills = args.prefills or (QUICK_PREFILLS if args.quick else PREFILLS)
    sizes = [(int(batch), int(context)) for batch, context in (each.split("x") for each in steps.split(","))]
    cells = [Cell(batch, context, num_runs) for batch, context in sizes]
    cells += [Cell(0, int(each), num_runs) for each in prefills.split(",")]
    with ExitStack() as stack:
        specs = [SideSpec(name, folder, args.dtype, not args.without_amx) for name in SIDES]
        sides = {spec.name: stack.enter_context(Side.running(spec)) for spec in specs}
        console = Console(stderr=True, highlight=False)
        for name, side in sides.items():
            console.print(f"  {name}: {side.choice}", markup=False)
        for cell in cells:
            measure(sides, cell, reporter, bars)
    reporter.close()
    return bars.close() if args.bars else 0


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--steps", default=None, help=f"batch x context of steps (default {STEPS})")
    parser.add_argument("--prefills", default=None, help=f"prompt lengths of prefills (default {PREFILLS})")
    parser.add_argument("--without-amx", action="store_true", help="do not use AMX in Baton's kernels")
    parser.add_argument("--pairs", type=int, default=0, help=f"rounds; 0: {PAIRS}, or {QUICK_PAIRS} with --quick")
    parser.add_argument("--bars", action="store_true", help="exit with 1 when a bar is missed")
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
