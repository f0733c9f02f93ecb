"""The terms of each way to prefill a request: by a chain, whose KV is then pushed, or by its generation group itself.

What is compared when a request is placed (`orchestrator.placement.predictions`), and on paper by `baton plan --explain`
(`planning.study.break_even`): both are made here, of the planner's predictions. Pure.
"""

from baton.results import PlacementTerms
from baton.types import TokenRange
from planning.planner import ChainPlanner

Batch = tuple[float, float]
"""Rows of a generation group that run already, a mean where they vary, and the mean tokens of a row."""


def chain_terms(
    planner: ChainPlanner,
    prefill_s: float,
    num_pushed: int,
    batch: Batch,
    *,
    is_elsewhere: bool,
    queue_s: float = 0.0,
    others_s: float = 0.0,
    fetch_s: float = 0.0,
) -> PlacementTerms:
    """Return the terms of a chain that computes for `prefill_s` and pushes the KV of `num_pushed` tokens to a group
    that runs `batch`. `is_elsewhere`: no rank of the chain is on the group's node; `fetch_s`: how long cached KV is
    fetched before."""
    transfer_s = planner.push_s(num_pushed, prefill_s)
    if is_elsewhere:
        transfer_s += 2 * planner.cost.link.latency_s  # the last piece there, and the commit's answer back
    step_s = _step_s(planner, batch) if planner.steps is not None else 0.0
    return PlacementTerms(
        queue_s=queue_s,
        prefill_s=prefill_s,
        steps_s=step_s / 2,  # on average half of the step that runs when the last KV arrives
        transfer_s=transfer_s,
        others_s=others_s,
        fetch_s=fetch_s,
    )


def local_terms(
    planner: ChainPlanner, tokens: TokenRange, batch: Batch, *, queue_s: float = 0.0, fetch_s: float = 0.0
) -> PlacementTerms | None:
    """Return the terms of a prefill of `tokens` by a generation group that runs `batch`, after a fetch of `fetch_s`
    seconds; None when it is unknown how groups prefill or what their steps take."""
    num_rows, context = batch
    found = planner.local_s(tokens, max(num_rows, 1.0) if num_rows else 0.0, context)
    if found is None:
        return None
    prefill_s, steps_s = found
    shared_s = steps_s * min(num_rows, 1.0)
    return PlacementTerms(queue_s, prefill_s, shared_s, transfer_s=0.0, others_s=0.0, fetch_s=fetch_s)


def _step_s(planner: ChainPlanner, batch: Batch) -> float:
    """Return the mean seconds of a step of that batch: with less than one row, there is no step part of the time."""
    num_rows, context = batch
    return min(num_rows, 1.0) * planner.step_s(max(num_rows, 1.0), context) if num_rows else 0.0
