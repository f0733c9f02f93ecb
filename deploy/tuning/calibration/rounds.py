"""Measures rounds of speculative decoding on a running cluster, with batches of sequences in which each step verifies a
fixed number of drafts. A round is a step that verifies drafts, and the steps that made these drafts.

A batch is one request with one choice for each sequence, as in the module `steps` of this folder. The request sets the
number of drafts. All sequences begin in the same step and run the same steps until the first of them ends, regardless
of how many drafts of each sequence are accepted. The tokens of a round get their timestamps one after another at the
end of the round. So the time between the first tokens of two successive rounds is the duration of a round, including
the steps that draft. Blocks; one batch at a time.
"""

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from baton import Client
from baton.errors import UnavailableError
from baton.planning.work_cost import NO_WORK, RowDrafts, StepWork, drafting_work, verifying_work
from baton.sampling_params import SamplingParams
from baton.types import DraftRound, TokenEvent
from deploy.tuning.calibration.steps import Grid, events_of

NUM_ROUNDS = 8
"""Minimum number of rounds that are measured of each batch."""
NUM_DRAFTS = (2, 6)
"""Numbers of drafts per sequence with which each batch is measured. A small and a large number distinguish the cost of
a draft from the cost of a round."""
_UNMEASURED = 2
"""Number of steps at the start of a sequence that produce tokens but are not measured: the end of the prompt, and the
first round."""
Measured = tuple[StepWork, float]
"""Work of a round, and its duration in seconds."""


@dataclass(frozen=True)
class ChoiceStep:
    """One step, as seen in the events of one choice of a batch."""

    first_ns: int
    """Time at which the first token of the step was made, in unix nanoseconds."""
    last_ns: int
    """Time at which the last token of the step was made, in unix nanoseconds."""
    num_before: int
    """Number of output tokens that the choice had before the step."""
    drafts: DraftRound | None
    """Drafts of the choice that the step verified; None if it verified no drafts."""


def max_tokens_of(num_drafts: int) -> int:
    """Return the number of output tokens that a measured sequence with `num_drafts` drafts needs, even if all drafts
    are accepted."""
    return _UNMEASURED + (NUM_ROUNDS + 2) * (1 + num_drafts)


def corners(grid: Grid) -> Grid:
    """Return a grid of only the smallest and the largest batch and context, because costs are linear between them."""
    batches, contexts = (tuple(sorted({axis[0], axis[-1]})) for axis in (grid.batches, grid.contexts))
    return Grid(batches, contexts, grid.repeats)


def measure_rounds(
    client: Client,
    grid: Grid,
    draft_keys: Mapping[str, int],
    *,
    rng: random.Random,
    done: Callable[[int], None],
) -> list[Measured]:
    """Measure rounds of every batch and context of `grid` with each of NUM_DRAFTS. For each measured batch, return the
    work and the seconds of the round of median duration. `draft_keys`: number of keys that a draft step attends to, by
    draft source; 0 for a source that drafts without a step. `done` is called with the work of each batch that has
    ended. Batches without drafts are left out. Raises UnavailableError if a batch was lost, or did not run alone."""
    model = client.model()
    rounds: dict[tuple[int, int, int], list[Measured]] = defaultdict(list)
    cases = list(itertools.product(grid.cells, NUM_DRAFTS))
    for _ in range(grid.repeats):
        for cell, num_drafts in rng.sample(cases, len(cases)):
            batch, context = cell
            num_output = max_tokens_of(num_drafts)
            num_prompt = max(min(context - num_output // 2, model.max_tokens - num_output), 1)
            prompt = [rng.randrange(model.vocab_size) for _ in range(num_prompt)]
            num_output = min(num_output, model.max_tokens - num_prompt)
            params = SamplingParams(n=batch, max_tokens=num_output, ignore_eos=True, num_drafts=num_drafts)
            events = events_of(client, prompt, params)
            rounds[*cell, num_drafts] += rounds_of(events, batch, num_prompt, num_drafts, draft_keys)
            done(grid.work(cell))
    return [sorted(each, key=lambda round: round[1])[len(each) // 2] for each in rounds.values() if each]


def rounds_of(
    events: Iterable[TokenEvent], batch: int, num_prompt: int, num_drafts: int, draft_keys: Mapping[str, int]
) -> list[Measured]:
    """Return the work and seconds of each round in which all sequences of a batch had `num_drafts` drafts. `events` are
    those of a batch that ran alone. Raises UnavailableError if the sequences did not run in the same steps."""
    of_choices: list[list[TokenEvent]] = [[] for _ in range(batch)]
    for event in events:
        if event.token is not None:
            of_choices[event.choice].append(event)
    steps = list(zip(*map(steps_of_choice, of_choices), strict=False))  # until one sequence ends
    found = []
    for before, step in itertools.pairwise(steps[_UNMEASURED - 1 :]):
        if max(each.last_ns for each in before) >= min(each.first_ns for each in step):
            raise UnavailableError(
                f"a batch of {batch} rows with drafts did not run in step, so its rounds cannot be separated: "
                "calibrate when the cluster is idle, or give smaller --batches or --contexts if its memory is short"
            )
        if all(each.drafts is not None and each.drafts.num_drafts == num_drafts for each in step):
            seconds = (min(each.first_ns for each in step) - min(each.first_ns for each in before)) / 1e9
            found.append((_work(step, num_prompt, draft_keys), seconds))
    return found


def steps_of_choice(events: Sequence[TokenEvent]) -> list[ChoiceStep]:
    """Return the steps of one choice, from the events of its tokens. In a step with drafts, the last event reports the
    drafts. All other steps have one token."""
    steps: list[ChoiceStep] = []
    for index, event in enumerate(events):
        steps.append(ChoiceStep(event.unix_ns, event.unix_ns, index, None))
        if (drafts := event.drafts) is not None:
            first = steps[-drafts.num_tokens]
            steps[-drafts.num_tokens :] = [ChoiceStep(first.first_ns, event.unix_ns, first.num_before, drafts)]
    return steps


def _work(step: Sequence[ChoiceStep], num_prompt: int, draft_keys: Mapping[str, int]) -> StepWork:
    """Return the work of a round: the work of the draft steps, by draft source, and the work of the step that
    verified."""
    rows: dict[str, list[RowDrafts]] = defaultdict(list)
    for each in step:
        assert each.drafts is not None
        source = each.drafts.source
        row = RowDrafts(num_prompt + each.num_before, each.drafts.num_drafts, draft_keys.get(source, 0))
        rows[source].append(row)
    drafting = sum(map(drafting_work, rows.values()), NO_WORK)
    return drafting + verifying_work([row for mine in rows.values() for row in mine])
