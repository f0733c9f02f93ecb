"""Batches are told apart by their tokens' times: only steps that all rows ran, and nothing else, count."""

import itertools
import random

import pytest

from baton.errors import InvalidArgumentError, UnavailableError
from baton.types import FinishReason, SampledToken, TokenEvent
from deploy.tuning.calibration.steps import (
    LEAST_CONTEXT,
    NUM_STEPS,
    Grid,
    default_batches,
    default_contexts,
    longest_context,
    steps_of,
)

STEP_NS = 5_000_000


def event(choice: int, index: int, unix_ns: int) -> TokenEvent:
    return TokenEvent(index, SampledToken(7, 0.0), "", unix_ns, choice=choice)


def batch(num_rows: int, *, first_step_ns: int = STEP_NS) -> list[TokenEvent]:
    """A row's tokens are stamped one after the other in each step, a microsecond apart."""
    starts = itertools.accumulate([first_step_ns, *[STEP_NS] * NUM_STEPS], initial=10**18)
    return [
        event(choice, index, start + 1000 * choice) for index, start in enumerate(starts) for choice in range(num_rows)
    ]


@pytest.mark.parametrize("num_rows", [1, 4])
def test_steps_are_what_lies_between_a_rows_tokens_but_for_the_first(num_rows: int) -> None:
    seconds = steps_of(batch(num_rows, first_step_ns=80 * STEP_NS), num_rows)
    assert seconds == pytest.approx([STEP_NS / 1e9] * NUM_STEPS)


def test_the_order_in_which_rows_events_come_does_not_matter() -> None:
    events = batch(4)
    by_row = sorted(events, key=lambda each: each.choice)
    assert steps_of(by_row, 4) == steps_of(events, 4)
    end = TokenEvent(NUM_STEPS + 2, None, "", 0, FinishReason.LENGTH)
    assert steps_of([*events, end], 4) == steps_of(events, 4)


def test_rows_that_did_not_run_in_step_are_refused() -> None:
    late = [event(each.choice, each.index, each.unix_ns + STEP_NS * (each.choice == 2)) for each in batch(4)]
    with pytest.raises(UnavailableError, match="a batch of 4 rows did not run in step"):
        steps_of(late, 4)


@pytest.mark.parametrize("num_missing", [1, 5])
def test_a_row_that_ended_early_is_refused(num_missing: int) -> None:
    events = batch(2)
    rng = random.Random(num_missing)
    missing = set(rng.sample([number for number, each in enumerate(events) if each.choice], num_missing))
    with pytest.raises(UnavailableError, match="did not run in step"):
        steps_of([each for number, each in enumerate(events) if number not in missing], 2)


def test_batches_reach_from_one_row_to_all() -> None:
    assert default_batches(1) == (1,)
    assert default_batches(6) == (1, 4, 6)
    assert default_batches(16) == (1, 4, 16)
    assert default_batches(300) == (1, 4, 16, 64)


@pytest.mark.parametrize(
    ("max_tokens", "contexts"),
    [(8192, (192, 1024, 4096)), (2048, (192, 1024)), (1024, (254, 1016)), (200, (48, 192)), (64, (14, 56))],
)
def test_contexts_leave_room_for_the_steps(max_tokens: int, contexts: tuple[int, ...]) -> None:
    assert default_contexts(max_tokens) == contexts
    assert contexts[0] >= LEAST_CONTEXT and contexts[-1] <= longest_context(max_tokens)


@pytest.mark.parametrize("max_tokens", [1, 16, 40])
def test_a_context_too_short_is_refused(max_tokens: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"requests have {max_tokens} tokens at most, too few for steps"):
        default_contexts(max_tokens)


def test_a_grid_is_every_batch_with_every_context() -> None:
    grid = Grid((1, 4), (192, 1024))
    assert grid.cells == [(1, 192), (1, 1024), (4, 192), (4, 1024)]
    assert grid.work((4, 1024)) > grid.work((1, 1024)) > grid.work((1, 192))
