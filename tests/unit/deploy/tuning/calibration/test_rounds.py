"""Rounds of drafts are told apart by their tokens' times, and measured beside the work that they were."""

from dataclasses import replace

import pytest

from baton.errors import UnavailableError
from baton.planning.work_cost import StepWork
from baton.types import DraftRound, FinishReason, SampledToken, TokenEvent
from deploy.tuning.calibration.rounds import (
    NUM_DRAFTS,
    NUM_ROUNDS,
    ChoiceStep,
    corners,
    max_tokens_of,
    rounds_of,
    steps_of_choice,
)
from deploy.tuning.calibration.steps import Grid

MS = 1_000_000
KEYS = {"streaming": 64, "ngram": 0}
PROMPT = 100


def row(choice: int, accepted: list[int], num_drafts: int = 2, source: str = "streaming") -> list[TokenEvent]:
    """A row's first token at 0 ms, then rounds with so many accepted drafts: one every 10 ms, a token every 0.1 ms."""
    events = [TokenEvent(0, SampledToken(5), "", choice, choice=choice)]
    for number, num in enumerate(accepted, 1):
        for index in range(num + 1):
            drafts = DraftRound(source, num_drafts, num, num + 1) if index == num else None
            stamp = 10 * MS * number + MS * index // 10 + choice
            events.append(TokenEvent(len(events), SampledToken(5), "", stamp, choice=choice, drafts=drafts))
    return events


def work(contexts: list[int], num_drafts: int, *, drafts_step: bool = True) -> StepWork:
    """Of a round by hand: every draft is a step over 64 keys of each row, and all are verified over all keys."""
    rows, keys = len(contexts), sum(contexts)
    verifying = StepWork(rows * (1 + num_drafts), keys, (1 + num_drafts) * keys)
    num = num_drafts * rows
    return verifying + StepWork(num, 64 * num, 64 * num, num_drafts) if drafts_step else verifying


def test_rounds_and_their_work_are_found_whatever_was_accepted() -> None:
    """The prompt's end and the first round are not measured; contexts are those before each round."""
    events = row(0, [0, 2, 1, 2]) + row(1, [2, 0, 2, 2])
    found = rounds_of(events, 2, PROMPT, 2, KEYS)
    assert [seconds for _, seconds in found] == pytest.approx([0.010] * 3)
    contexts = [[2, 4], [5, 5], [7, 8]]
    assert [each for each, _ in found] == [work([PROMPT + num for num in nums], 2) for nums in contexts]


def test_they_end_with_the_row_that_ends_first() -> None:
    assert len(rounds_of(row(0, [2] * 6) + row(1, [0] * 9), 2, PROMPT, 2, KEYS)) == 5
    assert not rounds_of(row(0, [2]) + row(1, [0] * 9), 2, PROMPT, 2, KEYS)


def test_rounds_with_fewer_drafts_than_asked_for_do_not_count() -> None:
    fewer = row(0, [0] * 4) + row(1, [0] * 4, num_drafts=1)
    assert not rounds_of(fewer, 2, PROMPT, 2, KEYS)
    plain = [TokenEvent(index, SampledToken(5), "", 10 * MS * index) for index in range(5)]
    assert not rounds_of(plain, 1, PROMPT, 2, KEYS)


def test_drafts_from_the_text_take_no_step() -> None:
    found = rounds_of(row(0, [0, 0], source="ngram"), 1, PROMPT, 2, KEYS)
    assert [each for each, _ in found] == [work([PROMPT + 2], 2, drafts_step=False)]


def test_rows_that_did_not_run_in_step_are_refused() -> None:
    late = [replace(each, unix_ns=each.unix_ns + 10 * MS) for each in row(0, [1] * 5)]
    with pytest.raises(UnavailableError, match="a batch of 2 rows with drafts did not run in step"):
        rounds_of(late + row(1, [1] * 5), 2, PROMPT, 2, KEYS)


def test_a_step_without_drafts_brings_one_token() -> None:
    plain = TokenEvent(4, SampledToken(5), "", 35 * MS)
    end = TokenEvent(5, SampledToken(5), "", 47 * MS, FinishReason.LENGTH, drafts=DraftRound("ngram", 3, 0, 1))
    steps = steps_of_choice([*row(0, [2]), plain, end])
    assert [(each.first_ns, each.last_ns, each.num_before) for each in steps] == [
        (0, 0, 0),
        (10 * MS, 10 * MS + MS // 5, 1),
        (35 * MS, 35 * MS, 4),
        (47 * MS, 47 * MS, 5),
    ]
    assert steps[2] == ChoiceStep(35 * MS, 35 * MS, 4, None)


@pytest.mark.parametrize("num_drafts", NUM_DRAFTS)
def test_a_row_is_long_enough_even_if_all_drafts_are_accepted(num_drafts: int) -> None:
    num_rounds = (max_tokens_of(num_drafts) - 1) // (1 + num_drafts)
    assert len(rounds_of(row(0, [num_drafts] * num_rounds, num_drafts), 1, PROMPT, num_drafts, KEYS)) >= NUM_ROUNDS


def test_the_ends_of_a_grid_are_measured() -> None:
    assert corners(Grid((1, 4, 16), (192, 1024, 4096))) == Grid((1, 16), (192, 4096))
    assert corners(Grid((4,), (192, 1024))) == Grid((4,), (192, 1024))
