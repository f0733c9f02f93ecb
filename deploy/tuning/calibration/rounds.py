"""Measures rounds of speculative decoding on a running cluster. A round is a step that verifies drafts, and the steps
that made these drafts. Each step of a batch verifies a fixed number of drafts of each sequence.

A batch is one request with one choice for each sequence, as in the module `steps` of this folder. The request sets the
number of drafts. All sequences begin in the same step, and run the same steps until the first of them ends. This does
not depend on how many drafts of each sequence are accepted.

The engine sets the timestamps of a round's tokens, one after another, at the end of the round. The time between the
first tokens of two successive rounds is therefore the duration of a round, including the steps that make drafts.
Functions block and run one batch at a time.
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
"""Minimum number of rounds of speculative decoding that are measured in each batch. A round is a step that verifies
drafts, and the steps that made these drafts."""
NUM_DRAFTS = (2, 6)
"""Numbers of drafts per sequence with which each batch is measured. A small and a large number are needed to separate
the cost of one draft from the fixed cost of a round of speculative decoding."""
_UNMEASURED = 2
"""Number of steps at the beginning of a sequence that are not measured: the step that ends the prompt, and the first
step that verifies drafts."""
Measured = tuple[StepWork, float]
"""Pair (work of a round of speculative decoding, duration of the round in seconds)."""


@dataclass(frozen=True)
class ChoiceStep:
    """One step of one choice of a request, computed from the events of the choice's tokens."""

    first_ns: int
    """Time, in unix nanoseconds, at which the step's first token was made."""
    last_ns: int
    """Time, in unix nanoseconds, at which the step's last token was made."""
    num_before: int
    """Number of output tokens that the choice had before the step."""
    drafts: DraftRound | None
    """Drafts that the step verified for this choice. None if the step did not verify drafts."""


def max_tokens_of(num_drafts: int) -> int:
    """Return the number of output tokens to request for a measured sequence with `num_drafts` drafts per round. It is
    large enough for `NUM_ROUNDS` rounds even if all drafts are accepted."""
    return _UNMEASURED + (NUM_ROUNDS + 2) * (1 + num_drafts)


def corners(grid: Grid) -> Grid:
    """Return a grid with only the smallest and the largest batch size and context of `grid`. These suffice because
    costs are linear between them."""
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
    """Measure rounds of speculative decoding for every batch size and context of `grid`, with each number of drafts in
    `NUM_DRAFTS`. A round is a step that verifies drafts, and the steps that made these drafts. For each combination,
    return the work and the duration in seconds of the round with the median duration. A combination is left out if none
    of its rounds had this number of drafts for every sequence.

    `draft_keys` has the number of keys that a draft step attends to, by draft source. It is 0 for a source that makes
    drafts without a step. `done` is called after each batch with an estimate of the time that it took, in the arbitrary
    unit of `Grid.work`. Raises UnavailableError if a batch was lost, or did not run alone.
    """
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
    """Return the work and the duration in seconds of each round of speculative decoding in which every sequence had
    exactly `num_drafts` drafts. `events` are the token events of a batch of `batch` sequences that ran alone. Each
    sequence has a prompt of `num_prompt` tokens. `draft_keys` has the number of keys that a draft step attends to, by
    draft source. Raises UnavailableError if the sequences did not run in the same steps."""
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
    """Group the token events of one choice by the step that produced the tokens, and return the steps in order. If a
    step verified drafts, the event of its last token reports them. A step without drafts has one token."""
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
