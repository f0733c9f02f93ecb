"""Benchmark of Baton, vLLM and llama.cpp from the view of their clients. All servers are called alternately, and each
uses all cores.

`baton serve` with its defaults is called over gRPC. The other servers (peers) have OpenAI's API, and are called over
HTTP:

    vllm        vLLM's CPU build (`--peer-python PATH`, the Python that `peers/setup_vllm_cpu.sh` installs)
    llama.cpp   `llama-server` (`--llama-server PATH`, the program that `peers/setup_llamacpp.sh` builds). It computes
                with the weights as stored in the model's GGUF file, which is Q4_1 for the default model, and so does
                Baton. vLLM computes with the same weights converted to `--dtype`

If a peer is not installed, the benchmark skips it and prints the name of its set-up script. All servers run during the
whole benchmark and are warmed up. A load is sent to a server only when all servers are idle, because vLLM's worker
busy-waits on a core for a second after its last step. This process is the client of all servers, and all times are from
its clock. All streams of a load are sent at once, for outputs of fixed length, sampled greedily. Prompts are passages
of novels. All servers get the same prompts, and no two of these begin with the same tokens.

The loads are the cells of `--grid`, written as STREAMSxPROMPT:OUTPUT: the number of streams, and their numbers of
prompt and output tokens. A cell that ends with +PROMPT:OUTPUT@SECONDS has one more prompt, which is sent SECONDS
seconds later than the streams. A cell has these output rows:

    tokens_s        all output tokens / (time of the last token - time of the first request)
    ttft_s          median time to first token
    p99_ms, gap_ms  99th percentile and median of the times between messages of a stream (with speculation a message may
                    contain several tokens)
    tpot_ms         time per output token
    last_ttft_s     time to first token of the later prompt, in cells with +PROMPT:OUTPUT@SECONDS
    load_s          duration of the whole load, compared with a bare engine (a process with a generation engine, without
                    gRPC and Ray); only in cell 16x205:64

The row idle_cores is measured before the loads: the number of cores that Baton's own processes use when idle, compared
with the cores that Ray uses. The loops in which Baton's actors wait for tasks count as Ray's.

With `--bars`, the benchmark fails if a value misses its limit. The limits are relative to the better peer's values.
"""

import argparse
import asyncio
import contextlib
import os
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from rich.console import Console

from baton.modeling.checkpoints.catalog import gguf_source
from baton.process.garbage import collect_rarely
from baton.settings.base import part_of
from baton.text.tokenizer import Tokenizer
from baton_lab.served_child import until_signal
from benchmarks.plots.served import draw
from benchmarks.sides.engine import EngineSide, EngineSpec, engine_alone
from benchmarks.sides.front_doors import BatonDoor
from benchmarks.sides.peer_commands import LLAMA_CPP, VLLM, llama_cpp, vllm
from benchmarks.sides.peer_server import Peer, peer_server
from benchmarks.support.answers import Answered, Ask, FrontDoor
from benchmarks.support.cells import Cell, parse_grid
from benchmarks.support.harness import Bars, Pairs, Reporter, Row, case, make_parser, peer_folder, progress, resolve
from benchmarks.support.passages import Passages
from benchmarks.support.processor_time import main_threads_used_s, share_of_a_core, until_quiet, used_s
from benchmarks.support.side_table import side_table
from benchmarks.support.streams import Load
from deploy.config.file import read_config
from deploy.machine.arrangement import arrange
from deploy.machine.resolved_model import ResolvedModel
from deploy.machine.this_machine import inspect_machine
from generate_workers.config import EngineConfig

GRID = "1x205:64,4x205:64,8x205:64,16x205:64,32x205:64,1x2250:48,4x2250:48,1x6450:16,8x4400:32,8x205:96+4400:16@1"
QUICK_GRID = "1x205:32,8x205:32"
ROUNDS = 5
IDLE_S = 20.0
QUICK_IDLE_S = 5.0
RATE_BAR = 1.3
"""Minimum ratio of Baton's tokens per second to those of the peer with the most."""
TTFT_BAR = 0.8
"""Maximum ratio of Baton's time to first token to that of the peer with the shortest."""
TPOT_BAR = 0.9
"""Maximum ratio of Baton's time per output token to llama.cpp's. Applies to loads with one stream."""
STALLED_MS = 300.0
"""Threshold in milliseconds of the 99th percentile of the times between messages of a stream. Above it, a peer's
streams count as stalled."""
STALLED_BAR = 0.5
"""Maximum ratio of Baton's 99th percentile of the times between messages of a stream to the lowest percentile of the
peers. Applies if the peers' streams are stalled."""
GAP_BAR = 1.0
"""Maximum of the same ratio if the streams of at least one peer are not stalled."""
IDLE_BAR = 0.02
"""Maximum number of cores used by Baton's own processes while no request runs."""
STACK_CELL = Cell(16, 205, 64)
STACK_BAR = 1.25
"""Maximum ratio of Baton's time for the load STACK_CELL to the bare engine's time for the same load."""
METRICS = (("tokens_s", "tokens/s"), ("ttft_s", "s"), ("p99_ms", "ms"), ("gap_ms", "ms"), ("tpot_ms", "ms"))
JOINING_METRICS = (*METRICS, ("last_ttft_s", "s"))
BATON = "baton"
_WARM = Cell(2, 64, 8)
_MISSING = "without {name}: run benchmarks/peers/{script} DIR and give {option}=DIR/bin/{file}"


@dataclass
class Found:
    """Results of all rounds of one cell of the grid."""

    answers: defaultdict[str, list[Answered]] = field(default_factory=lambda: defaultdict(list))
    """Answers by server, one entry per round. The keys are BATON and the names of the peers."""
    engine_s: list[float] = field(default_factory=list)
    """Seconds that the bare engine took for the load, one entry per round. Empty if the bare engine was not
    measured."""


@dataclass(frozen=True)
class Sides:
    """Running servers that are compared: Baton, its peers, and the bare engine."""

    baton: BatonDoor
    peers: Mapping[str, FrontDoor]
    engine: EngineSide | None

    async def until_quiet(self) -> None:
        """Wait until the processes of all servers are idle."""
        pids = set[int]().union(*(each.pids() for each in (self.baton, *self.peers.values())))
        await asyncio.to_thread(until_quiet, pids)


class Bench:
    """Starts all servers, measures them alternately, and reports the results."""

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
        num_slots = max(len(cell.sizes) for cell in (*self.grid, _WARM))
        self.peers = installed_peers(args, self.cores, num_slots, say=self.say)
        self.notes = [f"{BATON}: weights as in the model's file, activations {args.dtype}"]
        """Lines to print with the results, one per server, with its version and the format of its weights."""

    @property
    def settings(self) -> list[str]:
        """Arguments of `baton serve --set`: the model, and the benchmark's own `--set` options. All other settings have
        their defaults."""
        return [f"model.name={self.folder}", f"model.dtype={self.args.dtype}", *self.args.set]

    @contextlib.asynccontextmanager
    async def sides(self) -> AsyncIterator[Sides]:
        """Context manager. Start all servers one after the other, send each a small load to warm it up, and yield them.
        They are ended on exit."""
        async with AsyncExitStack() as stack:
            baton = await stack.enter_async_context(BatonDoor.opened(self.settings, self.say))
            peers, engine = dict[str, FrontDoor](), None
            for peer in self.peers:
                self.say(f"starting {peer.name}, which may take minutes when it runs for the first time")
                door = await stack.enter_async_context(peer_server(peer))
                peers[peer.name] = door
                self.notes.append(f"{peer.name} {door.version}: weights {peer.weights}")
            for note in self.notes:
                self.say(f"{note}, {len(self.cores)} threads")
            if STACK_CELL in self.grid:
                engine = await stack.enter_async_context(engine_alone(self._engine_spec()))
            collect_rarely()
            sides = Sides(baton, peers, engine)
            await self._round(_WARM, sides, Found())
            yield sides

    async def idle(self, baton: BatonDoor) -> None:
        """Report the number of cores that Baton's own processes use while no request runs, compared with the number
        that Ray's processes use. Ray also runs loops in Baton's actors; their processor time counts as Ray's."""
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
        """Measure all servers on one cell of the grid, after a warm-up round. Report and return the results."""
        found = Found()
        with progress(str(cell), self.rounds + 1) as advance:
            for number in range(self.rounds + 1):
                await self._round(cell, sides, found if number else Found())
                advance()
        report(self.reporter, self.bars, cell, found)
        return found

    async def _round(self, cell: Cell, sides: Sides, found: Found) -> None:
        """Send the same load to each side, one after the other, each time when all servers are idle."""
        asks = cell.asks(self.passages)
        for name, door in {BATON: sides.baton, **sides.peers}.items():
            await sides.until_quiet()
            found.answers[name].append(await door.answer(asks))
        if sides.engine is not None and cell == STACK_CELL:
            await sides.until_quiet()
            found.engine_s.append(await engine_seconds(sides.engine, asks))

    def _engine_spec(self) -> EngineSpec:
        """Return an engine like the cluster's: as this machine is arranged, with its threads or one for each core."""
        plan = arrange(read_config(None, self.settings), ResolvedModel(self.folder), inspect_machine())
        section = plan.config.generate
        num_threads = section.num_threads or len(self.cores)
        return EngineSpec(self.folder, self.args.dtype, num_threads, (), part_of(EngineConfig, section))

    def say(self, line: str) -> None:
        """Print a line that is not an output row."""
        self.console.print(f"  {line}", markup=False, soft_wrap=True)


def installed_peers(
    args: argparse.Namespace, cores: Sequence[int], num_slots: int, *, say: Callable[[str], None]
) -> list[Peer]:
    """Return the peers whose programs are installed. `say` is called with one line for each peer that is skipped."""
    peers = []
    if is_installed(args.peer_python):
        environment = dict(each.split("=", 1) for each in args.peer_env)
        peers.append(
            vllm(
                args.peer_python,
                peer_folder(args),
                args.dtype,
                cores,
                options=args.peer_option,
                environment=environment,
            )
        )
    else:
        say(_MISSING.format(name=VLLM, script="setup_vllm_cpu.sh", option="--peer-python", file="python"))
    gguf = args.llama_model or gguf_source(args.model)
    if not is_installed(args.llama_server):
        say(_MISSING.format(name=LLAMA_CPP, script="setup_llamacpp.sh", option="--llama-server", file="llama-server"))
    elif gguf is None:
        say(f"without {LLAMA_CPP}: {args.model} is not a GGUF file: give one with --llama-model")
    else:
        peers.append(llama_cpp(args.llama_server, gguf, cores, num_slots, options=args.llama_option))
    return peers


def is_installed(program: Path | None) -> bool:
    """Return True if `program` is given and exists."""
    return program is not None and program.is_file()


async def engine_seconds(engine: EngineSide, asks: Sequence[Ask]) -> float:
    """Run a load on the bare engine. Return the seconds from the first request to the last token."""
    measured = await engine.measure(Load(tuple(each.prompt for each in asks), asks[0].max_tokens))
    first_ns = min(each.asked_ns for each in measured.streams)
    return (max(each.token_ns[-1] for each in measured.streams) - first_ns) / 1e9


def report(reporter: Reporter, bars: Bars, cell: Cell, found: Found) -> None:
    """Report the output rows of one cell of the grid, one for each metric and peer. If no peer was measured, the
    baseline is `none`."""
    ours, peers = found.answers[BATON], [name for name in found.answers if name != BATON]
    rows: defaultdict[str, dict[str, Row]] = defaultdict(dict)
    for metric, unit in JOINING_METRICS if cell.joining else METRICS:
        values = [float(getattr(each, metric)) for each in ours]
        for name in peers:
            pairs = Pairs(values, [float(getattr(each, metric)) for each in found.answers[name]])
            rows[name][metric] = reporter.add(case(**cell.keys), metric, unit, name, pairs)
        if not peers:
            reporter.add(case(**cell.keys), metric, unit, "none", Pairs(values, [float("nan")] * len(ours)))
    if rows:
        judge(bars, cell, rows)
    if found.engine_s:
        row = reporter.add(
            case(**cell.keys), "load_s", "s", "engine", Pairs([each.seconds for each in ours], found.engine_s)
        )
        bars.at_most(f"{cell}: of the engine's time alone", 1 / row.ratio, STACK_BAR)


def judge(bars: Bars, cell: Cell, rows: Mapping[str, Mapping[str, Row]]) -> None:
    """Check the limits of one cell of the grid. They compare Baton's value of a metric with the better of the peers'
    values. `rows`: rows by metric, by peer."""

    def ratio(metric: str) -> float:
        return min(of_peer[metric].ratio for of_peer in rows.values())

    bars.at_least(f"{cell}: tokens/s over the better peer's", ratio("tokens_s"), RATE_BAR)
    bars.at_most(f"{cell}: time to first token over the better peer's", 1 / ratio("ttft_s"), TTFT_BAR)
    if cell.num_streams == 1 and LLAMA_CPP in rows:
        bars.at_most(f"{cell}: time per token over llama.cpp's", 1 / rows[LLAMA_CPP]["tpot_ms"].ratio, TPOT_BAR)
    is_stalled = min(of_peer["p99_ms"].baseline_value for of_peer in rows.values()) > STALLED_MS
    most = STALLED_BAR if is_stalled else GAP_BAR
    bars.at_most(f"{cell}: p99 between messages over the better peer's", 1 / ratio("p99_ms"), most)


async def run(args: argparse.Namespace) -> int:
    """Measure the idle servers and all cells of the grid. Return 0, or 1 if `--bars` is given and a value misses its
    limit."""
    bench, found = Bench(args), dict[str, Found]()
    async with bench.sides() as sides:
        await bench.idle(sides.baton)
        for cell in bench.grid:
            found[str(cell)] = await bench.measure(cell, sides)
    bench.reporter.close()
    answers = {name: each.answers for name, each in found.items()}
    if args.plot is not None:
        draw(answers, args.plot)
        bench.say(f"plot: {args.plot}")
    if args.table is not None:
        args.table.write_text(side_table(answers, bench.notes))
        bench.say(f"table: {args.table}")
    return bench.bars.close() if args.bars else 0


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--grid", type=parse_grid, default=None, help=f"cells, separated by commas (default {GRID})")
    parser.add_argument("--rounds", type=int, default=0, help=f"rounds of each cell; 0: {ROUNDS}, or 1 with --quick")
    parser.add_argument(
        "--set", action="append", default=[], help="setting of `baton serve`, for example a.b=c; repeatable"
    )
    parser.add_argument("--peer-python", type=Path, default=None, help="Python of vLLM's environment")
    parser.add_argument("--peer-model", type=Path, default=None, help="Hugging Face folder for vLLM; default: Baton's")
    parser.add_argument(
        "--peer-env", action="append", default=[], help="environment variable of vLLM, for example A=B; repeatable"
    )
    parser.add_argument(
        "--peer-option", action="append", default=[], help="option of `vllm serve`, for example --a=b; repeatable"
    )
    parser.add_argument("--llama-server", type=Path, default=None, help="llama.cpp's server")
    parser.add_argument(
        "--llama-model", type=Path, default=None, help="GGUF file for llama.cpp; default: that of Baton's model"
    )
    parser.add_argument(
        "--llama-option", action="append", default=[], help="option of `llama-server`, for example --a=b; repeatable"
    )
    parser.add_argument("--alone", action="store_true", help="with --bars: check only the bars that need no peer")
    parser.add_argument("--plot", type=Path, default=None, help="PNG file of all cells and sides")
    parser.add_argument("--table", type=Path, default=None, help="Markdown file with a table of all cells and sides")
    parser.add_argument("--bars", action="store_true", help="exit with 1 when a bar is missed")
    args = parser.parse_args()
    if args.bars and not (is_installed(args.peer_python) or is_installed(args.llama_server) or args.alone):
        parser.error("--bars compares with peers: give --peer-python or --llama-server, or --alone for other bars only")
    return asyncio.run(until_signal(run(args)))


if __name__ == "__main__":
    sys.exit(main())
