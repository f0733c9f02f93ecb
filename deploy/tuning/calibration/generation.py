"""Implements `baton calibrate --generate`, which measures generation steps on a running cluster.

The modules `steps` and `rounds` of this folder describe the measurement. `baton.planning.step_times` describes the
table of step times and its interpolation.
"""

import argparse
from typing import TYPE_CHECKING

from baton.errors import UnavailableError
from deploy.options import numbers as option_values

if TYPE_CHECKING:
    from rich.console import Console

    from baton import Client
    from baton.calls.cluster_state import ClusterState
    from baton.planning.step_times import StepTimes
    from baton.v1.planning_pb2_grpc import PlanningStub
    from deploy.tuning.calibration.rounds import Measured
    from deploy.tuning.calibration.steps import Grid

_ANSWER_S = 10.0
_DRAFT_MODEL = "model"
"""Name of the draft source that is a separate model (`generate.draft_model`)."""


def measured_steps(args: argparse.Namespace, client: "Client", stub: "PlanningStub", console: "Console") -> str:
    """Measure step times, show them, and return the text of the file that stores them. If groups use speculative
    decoding, rounds with drafts are also measured. The cluster must be idle."""
    from random import Random

    from baton.planning.step_times import dumps, loads, tabulate
    from baton.v1 import planning_pb2 as pb
    from deploy.options.screen import progress
    from deploy.tuning.calibration.rounds import NUM_DRAFTS, corners, measure_rounds
    from deploy.tuning.calibration.steps import measure_steps

    grid, draft_keys, rng = _grid(args, client), draft_keys_of(client.cluster_state()), Random()
    origin = loads(stub.GetStepTimes(pb.GetStepTimesRequest(), timeout=_ANSWER_S).step_times, "cluster")
    with progress(console, "measuring", sum(map(grid.work, grid.cells)) * grid.repeats) as done:
        seconds = measure_steps(client, grid, rng=rng, done=done)
    rounds: list[Measured] = []
    if draft_keys:
        ends = corners(grid)
        total = len(NUM_DRAFTS) * sum(map(ends.work, ends.cells)) * ends.repeats
        with progress(console, "measuring rounds of drafts", total) as done:
            rounds = measure_rounds(client, ends, draft_keys, rng=rng, done=done)
    times, residual = tabulate(origin, grid.batches, grid.contexts, seconds, rounds)
    _show(origin, times, residual, console)
    _show_rounds(times, rounds, bool(draft_keys), console)
    return dumps(times)


def draft_keys_of(state: "ClusterState") -> dict[str, int]:
    """Return, for each draft source of the generation groups, the number of keys that a draft step attends to. The
    draft source `model` is left out, because a draft model's steps are not steps of the measured model."""
    groups = [group.generation for group in state.groups if group.generation is not None]
    sources = {each.counts.source: each.draft_keys for group in groups for each in group.speculation.sources}
    return {name: num_keys for name, num_keys in sources.items() if name != _DRAFT_MODEL}


def _grid(args: argparse.Namespace, client: "Client") -> "Grid":
    from deploy.tuning.calibration.steps import LEAST_CONTEXT, Grid, default_batches, default_contexts, longest_context

    max_tokens = client.model().max_tokens
    held = [group.generation for group in client.cluster_state().groups if group.generation is not None]
    if not held:
        raise UnavailableError("no generation group says how many slots it has: wait until one answers")
    num_slots = max(status.num_slots for status in held)
    batches = default_batches(num_slots)
    if args.batches is not None:
        batches = option_values.counts("--batches", args.batches, batches[-1])
    if args.contexts is None:
        contexts = default_contexts(max_tokens)
    else:
        contexts = option_values.counts("--contexts", args.contexts, longest_context(max_tokens), LEAST_CONTEXT)
    return Grid(batches, contexts, args.repeats)


def _show(origin: "StepTimes", times: "StepTimes", residual: float, console: "Console") -> None:
    """Print the table of step times, with the earlier prediction next to each value, and the fitted cost."""
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


def _show_rounds(times: "StepTimes", rounds: "list[Measured]", has_drafts: bool, console: "Console") -> None:
    """Print the cost of verifying drafts, and each measured round next to the prediction of the fitted cost."""
    from rich.table import Table

    if not rounds:
        why = "no row had drafts" if has_drafts else "no group drafts, or only by a draft model (generate.speculation)"
        console.print(f"{why}: what comparing further queries with a key costs is taken over from the former table")
        return
    console.print("rounds: steps that draft, and the one that verifies; median milliseconds")
    table = Table("draft steps", "tokens", "keys", "pairs", "measured", "predicted", box=None)
    for work, seconds in rounds:
        counts = work.num_steps - 1, work.num_tokens, work.num_keys, work.num_pairs
        table.add_row(*map(str, counts), f"{seconds * 1e3:.2f}", f"{times.cost.seconds(work) * 1e3:.2f}")
    console.print(table)
    console.print(f"about {times.cost.pair_s * 1e6:.3f} ms for 1,000 further pairs of query and key")
