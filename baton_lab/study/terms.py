"""Predicted components of the time to first token, for the two options to prefill a request. Either a chain of prefill
ranks computes the prompt and pushes the KV, or the generation group computes the prompt itself (local prefill).

They are predictions for an idle chain and for a mean batch of a generation group, by the same planner that predicts for
requests (`orchestrator.placement.options`). All functions are pure.
"""

from baton.planning.planner import ChainPlanner
from baton.results.prefill_trace import PlacementTerms
from baton.types import TokenRange

Batch = tuple[float, float]
"""Batch of a generation group, as (number of running sequences, mean number of tokens of a sequence). The number of
sequences may be a mean over time, and is then not necessarily an integer."""


def chain_terms(
    planner: ChainPlanner,
    prefill_s: float,
    num_pushed: int,
    batch: Batch,
    *,
    is_elsewhere: bool,
) -> PlacementTerms:
    """Return the predicted times of a prefill by an idle chain, which pushes the KV to a generation group. `batch`
    describes the sequences that the group decodes meanwhile.

    `prefill_s` is the compute time of the chain in seconds, and `num_pushed` the number of tokens whose KV is pushed.
    `is_elsewhere` is True if no rank of the chain is on the group's node.
    """
    step_s = _step_s(planner, batch)
    return PlacementTerms(
        queue_s=0.0,
        prefill_s=prefill_s,
        steps_s=step_s / 2,  # on average half of the step that runs when the last KV arrives
        transfer_s=planner.transfer_s(num_pushed, prefill_s, is_elsewhere=is_elsewhere),
        others_s=0.0,
    )


def local_terms(planner: ChainPlanner, tokens: TokenRange, batch: Batch) -> PlacementTerms | None:
    """Return the predicted times of a local prefill, in which a generation group computes `tokens` itself. `batch`
    describes the sequences that the group decodes meanwhile. It is assumed that no other prompt waits.

    Returns None if the planner has no configuration of local prefill.
    """
    num_rows, context = batch
    found = planner.local_s(tokens, planner.step_s(max(num_rows, 1.0), context) if num_rows > 0 else 0.0)
    if found is None:
        return None
    prefill_s, steps_s = found
    return PlacementTerms(0.0, prefill_s, steps_s * min(num_rows, 1.0), transfer_s=0.0, others_s=0.0)


def _step_s(planner: ChainPlanner, batch: Batch) -> float:
    """Return the mean seconds of a step of a batch. If the mean number of sequences is below one, the result is scaled
    down, because no step runs part of the time."""
    num_rows, context = batch
    return min(num_rows, 1.0) * planner.step_s(max(num_rows, 1.0), context) if num_rows else 0.0
