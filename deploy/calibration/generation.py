"""`baton calibrate --generate`: measures generation steps on a running cluster, and hands the times over to it.

deploy.calibration.steps says how they are measured; planning.step_times describes the table, and how it is
interpolated.
"""

import argparse
from typing import TYPE_CHECKING

from baton.errors import UnavailableError
from deploy.options import numbers as option_values

if TYPE_CHECKING:
    from rich.console import Console

    from baton import Client
    from baton.v1.planning_pb2_grpc import PlanningStub
    from deploy.calibration.steps import Grid
    from planning.step_times import StepTimes

_ANSWER_S = 10.0


def calibrate_generate(args: argparse.Namespace, client: "Client", stub: "PlanningStub", console: "Console") -> None:
    """Measure step times, show them, and hand them over, unless --dry-run is given. Assumes that the cluster is
    idle."""
    from planning.step_times import save, tabulate

    grid = _grid(args, client)
    origin = _in_force(stub)
    seconds = _measure(args, client, grid, console)
    times, residual = tabulate(origin, grid.batches, grid.contexts, seconds)
    _show(origin, times, residual, console)
    if args.output is not None:
        save(times, args.output)
        console.print(f"written to {args.output}")
    if args.dry_run:
        console.print("the cluster keeps the times it had (--dry-run)")
    else:
        path = _hand_over(stub, times, force=args.force)
        console.print(f"the cluster answers with them from now on, and keeps them in {path}")


def _grid(args: argparse.Namespace, client: "Client") -> "Grid":
    from deploy.calibration.steps import LEAST_CONTEXT, Grid, default_batches, default_contexts, longest_context

    max_tokens = client.model().max_tokens
    held = [group.generation for group in client.cluster_state().groups if group.generation is not None]
    if not held:
        raise UnavailableError("no generation group says how many slots it has: wait until one answers")
    num_slots = max(status.num_slots for status in held)
    batches = default_batches(num_slots)
    if args.batches is not None:
        batches = option_values.counts("--batches", args.batches, batches[-1])
    if args.contexts is None:
        return Grid(batches, default_contexts(max_tokens))
    return Grid(batches, option_values.counts("--contexts", args.contexts, longest_context(max_tokens), LEAST_CONTEXT))


def _in_force(stub: "PlanningStub") -> "StepTimes":
    """Return the step times that the cluster predicts by."""
    from baton.status import translate_rpc_errors
    from baton.v1 import planning_pb2 as pb
    from planning.step_times import loads

    with translate_rpc_errors():
        return loads(stub.GetStepTimes(pb.GetStepTimesRequest(), timeout=_ANSWER_S).step_times, "cluster")


def _hand_over(stub: "PlanningStub", times: "StepTimes", *, force: bool) -> str:
    """Hand the times over to the cluster; return the path where the orchestrator keeps them."""
    from baton.status import translate_rpc_errors
    from baton.v1 import planning_pb2 as pb
    from planning.step_times import dumps

    with translate_rpc_errors():
        reply = stub.UseStepTimes(pb.UseStepTimesRequest(step_times=dumps(times), force=force), timeout=_ANSWER_S)
    return reply.path or "no file"


def _measure(args: argparse.Namespace, client: "Client", grid: "Grid", console: "Console") -> list[list[float]]:
    from random import Random

    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from deploy.calibration.steps import measure_steps

    columns = (TextColumn("measuring"), BarColumn(), TextColumn("{task.percentage:.0f} %"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=sum(map(grid.work, grid.cells)) * args.repeats)
        return measure_steps(
            client,
            grid,
            repeats=args.repeats,
            rng=Random(),
            done=lambda work: progress.advance(task, work),
        )


def _show(origin: "StepTimes", times: "StepTimes", residual: float, console: "Console") -> None:
    """Print the table, earlier predictions beside it, and the fitted cost."""
    from rich.table import Table

    console.print(f"{times.model} on {times.hardware} (fingerprint {times.fingerprint})")
    console.print("milliseconds of a step, median; in brackets, predicted before")
    table = Table("rows", *(f"{each} tokens" for each in times.contexts), box=None)
    for batch, row in zip(times.batches, times.seconds, strict=True):
        before = (origin.step_s(batch, context) for context in times.contexts)
        cells = (f"{now * 1e3:.2f} ({then * 1e3:.2f})" for now, then in zip(row, before, strict=True))
        table.add_row(str(batch), *cells)
    console.print(table)
    cost, kv_bytes = times.cost, times.shape.num_layers * times.shape.kv_bytes
    rate = f", {kv_bytes / cost.token_s / 1e9:.1f} GB/s" if cost.token_s else ""
    console.print(
        f"about {cost.base_s * 1e3:.2f} ms a step, {cost.row_s * 1e3:.3f} ms a row, and {cost.token_s * 1e6:.3f} ms "
        f"for 1,000 tokens of KV{rate}; the measured times deviate from that by {residual:.1%} at most"
    )
