"""How do Baton and vLLM compare, as clients see them? Both through their front doors, alternately, on the same cores.

`baton serve` with its defaults, over gRPC, and vLLM's CPU build with its OpenAI interface, over HTTP (`--peer-python
PATH`, of the environment that `peers/setup_vllm_cpu.sh` makes, and `--peer-model DIR`; without them its rows are
absent). Both run all along, warmed. Each gets its load once the other is quiet: vLLM's worker spins on a core for a
second after its last step. This process is the client of both, and all instants are by its clock. A load is closed: all
requests are sent at once, for outputs of fixed length, greedily. Prompts are passages of novels, none of which begins
like another; both sides get the same ones.

A cell STREAMSxPROMPT:OUTPUT of `--grid` has these rows:

    tokens_s        all output tokens, from the first request to the last token
    ttft_s          median time to first token
    p99_ms, gap_ms  99th percentile and median of the times between messages of a stream (with speculation a message may
                    hold several tokens)
    tpot_ms         time per output token
    last_ttft_s     of the prompt that joins, in cells with +PROMPT:OUTPUT@SECONDS
    load_s          of the whole load, compared with the same engine alone in a process, only in the cell 16x205:64

Before the load: idle_cores, processor seconds a second of Baton's own idle processes, compared with those of Ray. Ray's
include the loops by which Baton's actors wait for tasks. `--bars` checks what is promised.
"""

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from rich.console import Console

from baton.process.garbage import collect_rarely
from baton.settings.base import part_of
from baton.text.tokenizer import Tokenizer
from baton_lab.served_child import until_signal
from benchmarks.plots.served import draw
from benchmarks.sides.engine import EngineSide, EngineSpec, engine_alone
from benchmarks.sides.front_doors import BatonDoor
from benchmarks.sides.vllm_server import VllmSpec, vllm_server
from benchmarks.support.answers import Answered, Ask, FrontDoor
from benchmarks.support.cells import Cell, parse_grid
from benchmarks.support.harness import Bars, Pairs, Reporter, Row, case, make_parser, progress, resolve
from benchmarks.support.passages import Passages
from benchmarks.support.processor_time import main_threads_used_s, share_of_a_core, until_quiet, used_s
from benchmarks.support.streams import Load
from deploy.config.file import read_sections
from deploy.machine.arrangement import arrange
from deploy.machine.doctor import inspect_machine
from generate_workers.config import EngineConfig

GRID = "1x205:64,8x205:64,16x205:64,1x2250:48,4x2250:48,1x6450:16,8x4400:32,8x205:96+4400:16@1"
QUICK_GRID = "1x205:32,8x205:32"
ROUNDS = 5
IDLE_S = 20.0
QUICK_IDLE_S = 5.0
RATE_BAR = 1.1
"""Least tokens/s over vLLM's, with up to RATE_STREAMS streams."""
RATE_STREAMS = 16
TTFT_BAR = 1.0
"""Most time to first token over vLLM's."""
LONG_TTFT_BAR = 0.85
"""The same for prompts of LONG_TOKENS tokens and more."""
LONG_TOKENS = 6450
STALLED_MS = 500.0
"""99th percentile of vLLM's times between messages above which its streams stall."""
STALLED_BAR = 0.5
"""Most 99th percentile of the times between messages over vLLM's, where its streams stall."""
GAP_BAR = 1.2
"""The same where its streams do not stall."""
IDLE_BAR = 0.02
"""Most processor seconds a second of Baton's own processes while no request runs."""
STACK_CELL = Cell(16, 205, 64)
STACK_BAR = 1.25
"""Most time of STACK_CELL's load over the time that the engine alone takes for it."""
METRICS = (("tokens_s", "tokens/s"), ("ttft_s", "s"), ("p99_ms", "ms"), ("gap_ms", "ms"), ("tpot_ms", "ms"))
JOINING_METRICS = (*METRICS, ("last_ttft_s", "s"))
_WARM = Cell(2, 64, 8)


@dataclass
class Found:
    """The rounds of one cell, one answer of each side a round; the last two are empty without such a side."""

    ours: list[Answered] = field(default_factory=list)
    theirs: list[Answered] = field(default_factory=list)
    engine_s: list[float] = field(default_factory=list)
    """Seconds that the engine alone took for the load."""


@dataclass(frozen=True)
class Sides:
    """All sides that are measured, running."""

    baton: BatonDoor
    peer: FrontDoor | None
    engine: EngineSide | None


class Bench:
    """Starts the sides, measures them alternately, and reports."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.folder = resolve(args)
        self.cores = sorted(os.sched_getaffinity(0))
        self.reporter = Reporter("served", args.json)
        self.bars = Bars()
        self.console = Console(stderr=True, highlight=False)
        self.passages = Passages.of(Tokenizer.load(self.folder))
        self.grid: list[Cell] = args.grid or parse_grid(QUICK_GRID if args.quick else GRID)
        self.rounds: int = args.rounds or (1 if args.quick else ROUNDS)

    @property
    def settings(self) -> list[str]:
        """Settings of `baton serve`: the model, and those of `--set`; all others are its defaults."""
        return [f"model.name={self.folder}", f"model.dtype={self.args.dtype}", *self.args.set]

    @contextlib.asynccontextmanager
    async def sides(self) -> AsyncIterator[Sides]:
        """Start all sides, one after the other, and send each a small load; end them afterwards."""
        async with AsyncExitStack() as stack:
            baton = await stack.enter_async_context(BatonDoor.opened(self.settings, self.say))
            peer = engine = None
            if self.args.peer_python is not None:
                self.say("starting vLLM, which compiles for minutes when it runs for the first time")
                peer = await stack.enter_async_context(vllm_server(self._peer_spec()))
                self.say(f"peer: vLLM {peer.version}, {len(self.cores)} threads")
            if STACK_CELL in self.grid:
                engine = await stack.enter_async_context(engine_alone(self._engine_spec()))
            collect_rarely()
            sides = Sides(baton, peer, engine)
            await self._round(_WARM, sides, Found())
            yield sides

    async def idle(self, baton: BatonDoor) -> None:
        """Report what Baton's own processes use while no request runs, compared with Ray's, to which the loops of Ray
        in each of Baton's actors count."""
        seconds = QUICK_IDLE_S if self.args.quick else IDLE_S
        own, rays, actors = baton.processes()
        before, loops_before, start_s = used_s(own | rays), main_threads_used_s(actors), monotonic()
        await asyncio.sleep(seconds)  # the time that is measured
        after, loops_after, elapsed_s = used_s(own | rays), main_threads_used_s(actors), monotonic() - start_s
        loops = share_of_a_core(loops_before, loops_after, elapsed_s)
        shares = [
            share_of_a_core({pid: before[pid] for pid in pids & before.keys()}, after, elapsed_s) + sign * loops
            for pids, sign in ((own, -1), (rays, 1))
        ]
        name = case(policy="idle", seconds=round(seconds))
        self.reporter.add(name, "idle_cores", "cores", "ray", Pairs(shares[:1], shares[1:]))
        self.bars.at_most("of a core for Baton's own idle processes", shares[0], IDLE_BAR)

    async def measure(self, cell: Cell, sides: Sides) -> Found:
        """Measure one cell, after a round that is not counted, and report it."""
        found = Found()
        with progress(str(cell), self.rounds + 1) as advance:
            for number in range(self.rounds + 1):
                await self._round(cell, sides, found if number else Found())
                advance()
        self._report(cell, found)
        return found

    async def _round(self, cell: Cell, sides: Sides, found: Found) -> None:
        """Send the same load to each side, one after the other, each when the other is quiet."""
        asks = cell.asks(self.passages)
        if sides.peer is not None:
            await asyncio.to_thread(until_quiet, sides.peer.pids())
        found.ours.append(await sides.baton.answer(asks))
        if sides.peer is not None:
            await asyncio.to_thread(until_quiet, sides.baton.pids())
            found.theirs.append(await sides.peer.answer(asks))
            await asyncio.to_thread(until_quiet, sides.peer.pids())
        if sides.engine is not None and cell == STACK_CELL:
            found.engine_s.append(await engine_seconds(sides.engine, asks))

    def _report(self, cell: Cell, found: Found) -> None:
        rows = {}
        for metric, unit in JOINING_METRICS if cell.joining else METRICS:
            ours = [float(getattr(each, metric)) for each in found.ours]
            theirs = [float(getattr(each, metric)) for each in found.theirs]
            if theirs:
                rows[metric] = self.reporter.add(case(**cell.keys), metric, unit, "vllm", Pairs(ours, theirs))
            else:  # there is nothing to compare with
                self.reporter.add(case(**cell.keys), metric, unit, "none", Pairs(ours, [float("nan")] * len(ours)))
        if rows:
            judge(self.bars, cell, rows)
        if found.engine_s:
            pairs = Pairs([each.seconds for each in found.ours], found.engine_s)
            row = self.reporter.add(case(**cell.keys), "load_s", "s", "engine", pairs)
            self.bars.at_most(f"{cell}: of the engine's time alone", 1 / row.ratio, STACK_BAR)

    def _engine_spec(self) -> EngineSpec:
        """Return an engine like the cluster's: as this machine is arranged, with its threads or one for each core."""
        section = arrange(read_sections(None, self.settings), self.folder, inspect_machine())[0].generate
        num_threads = section.num_threads or len(self.cores)
        return EngineSpec(self.folder, self.args.dtype, num_threads, (), part_of(EngineConfig, section))

    def _peer_spec(self) -> VllmSpec:
        args = self.args
        environment = dict(each.split("=", 1) for each in args.peer_env)
        model = args.peer_model or self.folder
        return VllmSpec(args.peer_python, model, args.dtype, self.cores, args.peer_option, environment)

    def say(self, line: str) -> None:
        """Print a line that is not a row."""
        self.console.print(f"  {line}", markup=False)


async def engine_seconds(engine: EngineSide, asks: Sequence[Ask]) -> float:
    """Return the seconds that an engine alone takes for a load, from the first request to the last token."""
    measured = await engine.measure(Load(tuple(each.prompt for each in asks), asks[0].max_tokens))
    first_ns = min(each.asked_ns for each in measured.streams)
    return (max(each.token_ns[-1] for each in measured.streams) - first_ns) / 1e9


def judge(bars: Bars, cell: Cell, rows: dict[str, Row]) -> None:
    """Check what is promised of one cell, compared with vLLM."""
    if cell.num_streams <= RATE_STREAMS:
        bars.at_least(f"{cell}: tokens/s over vLLM's", rows["tokens_s"].ratio, RATE_BAR)
    most = LONG_TTFT_BAR if cell.num_tokens >= LONG_TOKENS else TTFT_BAR
    bars.at_most(f"{cell}: time to first token over vLLM's", 1 / rows["ttft_s"].ratio, most)
    most = STALLED_BAR if rows["p99_ms"].baseline_value > STALLED_MS else GAP_BAR
    bars.at_most(f"{cell}: p99 between messages over vLLM's", 1 / rows["p99_ms"].ratio, most)


async def run(args: argparse.Namespace) -> int:
    """Measure everything; with --bars, return 1 when a bar is missed."""
    bench, found = Bench(args), dict[str, Found]()
    async with bench.sides() as sides:
        await bench.idle(sides.baton)
        for cell in bench.grid:
            found[str(cell)] = await bench.measure(cell, sides)
    bench.reporter.close()
    if args.plot is not None:
        draw({name: {"baton": each.ours, "vllm": each.theirs} for name, each in found.items()}, args.plot)
        bench.say(f"plot: {args.plot}")
    return bench.bars.close() if args.bars else 0


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--grid", type=parse_grid, default=None, help=f"cells, with commas (default {GRID})")
    parser.add_argument("--rounds", type=int, default=0, help=f"rounds of each cell; 0: {ROUNDS}, or 1 with --quick")
    parser.add_argument("--set", action="append", default=[], help="a setting of `baton serve`, like a.b=c; repeatable")
    parser.add_argument("--peer-python", type=Path, default=None, help="Python of vLLM's environment")
    parser.add_argument("--peer-model", type=Path, default=None, help="Hugging Face folder for vLLM; default: ours")
    parser.add_argument("--peer-env", action="append", default=[], help="variable of vLLM, like A=B; repeatable")
    parser.add_argument(
        "--peer-option", action="append", default=[], help="option of `vllm serve`, like --a=b; repeatable"
    )
    parser.add_argument("--alone", action="store_true", help="with --bars: check without vLLM what can be")
    parser.add_argument("--plot", type=Path, default=None, help="PNG file of all cells, both sides")
    parser.add_argument("--bars", action="store_true", help="exit with 1 when the promised does not hold")
    args = parser.parse_args()
    if args.bars and args.peer_python is None and not args.alone:
        parser.error("--bars compares with vLLM: give --peer-python, or --alone for what can be checked without")
    return asyncio.run(until_signal(run(args)))


if __name__ == "__main__":
    sys.exit(main())
