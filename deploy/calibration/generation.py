"""The work of `baton calibrate --generate`: measures generation steps on a running cluster.

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


def measured_steps(args: argparse.Namespace, client: "Client", stub: "PlanningStub", console: "Console") -> str:
    """Measure step times, show them, and return the text of their file. Assumes that the cluster is idle."""
    from random import Random

    from baton.v1 import planning_pb2 as pb
    from deploy.calibration.steps import measure_steps
    from deploy.options.screen import progress
    from planning.step_times import dumps, loads, tabulate

    grid = _grid(args, client)
    origin = loads(stub.GetStepTimes(pb.GetStepTimesRequest(), timeout=_ANSWER_S).step_times, "cluster")
    with progress(console, "measuring", sum(map(grid.work, grid.cells)) * args.repeats) as done:
        seconds = measure_steps(client, grid, repeats=args.repeats, rng=Random(), done=done)
    times, residual = tabulate(origin, grid.batches, grid.contexts, seconds)
    _show(origin, times, residual, console)
    return dumps(times)


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
    rate = f", {kv_bytes / cost.key_s / 1e9:.1f} GB/s" if cost.key_s else ""
    console.print(
        f"about {cost.step_s * 1e3:.2f} ms a step, {cost.token_s * 1e3:.3f} ms a token, and {cost.key_s * 1e6:.3f} ms "
        f"for 1,000 tokens of KV{rate}; the measured times deviate from that by {residual:.1%} at most"
    )
