"""Session of `baton chaos`. It starts a cluster of child processes, and runs the schedule of each seed first without
faults and then with faults.

Progress is written to standard error, the table of results to standard output, and the processes' logs to a file. Runs
on the launcher's event loop.
"""

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from baton.errors import BatonError, ConfigError
from baton.modeling.checkpoints.weights import load_config
from baton.modeling.forward.model_config import ModelConfig
from baton.process.clock import SystemClock
from baton.results.completion import ModelInfo
from baton.settings.place import LOOPBACK, WorkerPlace
from baton.transport.identity import ClusterSecret
from baton_lab.chaos.cluster import ChaosCluster, ChaosPlan
from baton_lab.chaos.faults import SeededPlan
from baton_lab.chaos.judge import CalmJudge
from baton_lab.chaos.report import Answer, Outcome, Report
from baton_lab.chaos.run import Bounds, ChaosRun
from baton_lab.chaos.schedule import NUM_ENGINES, Schedule, Shape
from baton_lab.served_child import until_signal
from deploy.config.file import read_config
from deploy.config.worker import WorkerConfig
from deploy.groups.keeper import OrchestratorPlan
from deploy.groups.processes import ProcessSpawner
from deploy.groups.surroundings import Heartbeat
from deploy.machine.cluster_plan import ClusterPlan
from deploy.machine.model_folder import resolve_folder
from deploy.machine.planners import served_planner
from deploy.machine.resolved_model import ResolvedModel
from deploy.machine.this_machine import prepare_kernels
from orchestrator.requests.config import OrchestratorConfig

CLOCK = SystemClock()
_STDERR = 2
_FILE_WIDTH = 160
_COLUMNS = "seed", "requests", "retried", "resumed", "blows", "calls", "tokens", "cached", "differ", "free after"
_NUM_RANKS = 2
_NUM_SLOTS = 6
_MAX_TOKENS = 512
_HEARTBEAT = Heartbeat(interval_s=1.0, dead_after_s=10.0)
"""Heartbeat settings with a long timeout. An engine limited to a fifth of a core answers late, especially on a busy
machine, and must not be declared dead."""
_LIMITS = OrchestratorConfig(
    avoid_s=0.5,
    prefill_wait_s=20.0,
    generation_wait_s=60.0,
    max_attempts=8,
    lease_ttl_s=5.0,
    max_queued_requests=4096,
    disaggregation="always",  # prompts are short, and chains are what faults should hit
)
_BOUNDS = Bounds(request_s=180.0, settle_s=60.0)
"""Time limits for requests and recovery. They are long because a worker takes seconds to load its model, and several
workers may load at the same time."""


def run_session(args: argparse.Namespace) -> int:
    """Run the schedules that the options of `baton chaos` select. Return the exit status."""
    console = Console(stderr=True)
    folder = resolve_folder(args.model, args.cache, console)
    prepare_kernels(console)
    seeds = range(1, args.seeds + 1) if args.seed is None else range(args.seed, args.seed + 1)
    with _diverted(args.log) as shown:
        return asyncio.run(until_signal(_run(args, folder, seeds, shown)))


async def _run(args: argparse.Namespace, folder: Path, seeds: range, console: Console) -> int:
    """Run all seeds and print the table. Return 1 if a condition was violated, else 0."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=2 * args.requests * len(seeds))

        def tell(line: str) -> None:
            progress.update(task, description=line)

        def count(answer: Answer) -> None:
            progress.advance(task)

        model = load_config(folder)
        async with ChaosCluster(_plan(folder, model, args.set), CLOCK, tell) as cluster:
            shape = Shape(
                cluster.victims,
                model.vocab_size,
                args.requests,
                num_blows=args.blows,
                engines=cluster.engines,
                num_hung=args.hung,
                num_slow=args.slow,
            )
            reports = [await _judged(cluster, Schedule.of(seed, shape), tell, count) for seed in seeds]
    _show(reports, args)
    return 1 if any(report.complaints for report in reports) else 0


async def _judged(
    cluster: ChaosCluster, schedule: Schedule, tell: Callable[[str], None], count: Callable[[Answer], None]
) -> Report:
    """Run the schedule without faults and then with them, and compare the tokens. Raises BatonError if the run without
    faults failed, because it is the reference."""
    tell(f"seed {schedule.seed}, without faults")
    calm = await ChaosRun(cluster, schedule.calm, CLOCK, bounds=_BOUNDS, on_end=count).run(lambda *_: "")
    if calm.complaints or calm.outcomes[Outcome.ANSWERED] < len(calm.answers):
        raise BatonError(f"the run without faults failed: see the log; {calm}")
    tell(f"seed {schedule.seed}")
    judge = CalmJudge(calm.answers)
    report = await ChaosRun(cluster, schedule, CLOCK, bounds=_BOUNDS, on_end=count).run(judge)
    if judge.has_too_many_exceptions:
        report.complaints.append(
            f"{judge.num_exceptions} of {judge.num_tokens} tokens differ from the run without faults"
        )
    report.num_exceptions = judge.num_exceptions
    return report


def _plan(folder: Path, model: ModelConfig, assignments: Sequence[str]) -> ChaosPlan:
    """Return the plan of a cluster on this machine, in fp32, where tokens do not depend on chunking and batching.
    `assignments`: additional settings, each `section.field=value`. Raises ConfigError."""
    fixed = (
        "model.dtype=float32",
        f"prefill.num_ranks={_NUM_RANKS}",
        f"generate.num_groups={NUM_ENGINES}",
        "generate.num_threads=1",
        f"generate.num_slots={_NUM_SLOTS}",
        f"generate.max_slot_tokens={_MAX_TOKENS}",
    )
    config = read_config(None, [*fixed, *assignments]).local.config
    served = ResolvedModel(folder)
    max_tokens = served.max_tokens(_MAX_TOKENS)
    place = WorkerPlace(model_folder=folder, secret=ClusterSecret.new().text)
    workers = partial(config.workers, place=place)

    def orchestrator(layout: str) -> OrchestratorPlan:
        info = ModelInfo(folder.name, max_tokens, model.vocab_size, config.model.dtype, False, layout)
        worker = WorkerConfig("orchestrator", 0, 0, place, _LIMITS)
        planner = partial(served_planner, ClusterPlan(config, served))
        return OrchestratorPlan(worker, info, model.eos_token_ids, planner, config.worker_host or LOOPBACK)

    return ChaosPlan(
        spawner=ProcessSpawner(config.supervision.start_timeout_s),
        chain=workers("prefill-0"),
        engines=[each for group in range(NUM_ENGINES) for each in workers(f"generate-{group}")],
        orchestrator=orchestrator,
        faults=SeededPlan(),
        heartbeat=_HEARTBEAT,
        num_slots=_NUM_SLOTS,
        max_tokens=max_tokens,
    )


def _show(reports: Sequence[Report], args: argparse.Namespace) -> None:
    """Print a table with one line per seed, then for each failed seed the violated conditions and the command that
    repeats it."""
    console = Console(width=None if sys.stdout.isatty() else _FILE_WIDTH)
    columns = (Column(name, justify="left" if name == "requests" else "right", no_wrap=True) for name in _COLUMNS)
    table = Table(*columns, "", box=None)
    for report in reports:
        table.add_row(
            str(report.schedule.seed),
            report.outcomes_text,
            *map(str, (report.num_retried, report.num_resumed)),
            f"{report.num_hit} of {len(report.schedule.blows)}",
            *map(str, (report.num_calls_struck, report.num_tokens, report.num_cached_tokens, report.num_exceptions)),
            f"{report.settled_s:.1f} s",
            "[red]FAILED[/]" if report.complaints else "[green]ok[/]",
        )
    console.print(table)
    for report in reports:
        for note in report.notes:
            console.print(f"seed {report.schedule.seed}: {note}", markup=False)
    for report in (each for each in reports if each.complaints):
        console.print(f"\n{report.schedule}", markup=False)
        for complaint in report.complaints:
            console.print(f"  did not hold: {complaint}", markup=False)
        numbers = [f"--{name} {getattr(args, name)}" for name in ("requests", "blows", "hung", "slow")]
        options = [*numbers, *(f"--set {each}" for each in args.set)]
        again = f"baton chaos --seed {report.schedule.seed} {' '.join(options)}"
        console.print(f"repeat: {again} --model {args.model}; logs of the processes: {args.log}", markup=False)


@contextlib.contextmanager
def _diverted(log: Path) -> Iterator[Console]:
    """Send standard error of this process and its children to the log file. Yield a console on the terminal."""
    try:
        file = log.open("w")
    except OSError as error:
        raise ConfigError(f"--log {log} cannot be written ({error.strerror}): name another file") from error
    with file, os.fdopen(os.dup(_STDERR), "w") as shown:
        os.dup2(file.fileno(), _STDERR)
        try:
            yield Console(file=shown)
        finally:
            os.dup2(shown.fileno(), _STDERR)
