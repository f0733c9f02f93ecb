"""Answers of front doors: messages are steps, and an answer has what was asked for."""

import pytest

from benchmarks.sides.front_doors import checked, last_of_step
from benchmarks.support.answers import Answer, Ask


def test_tokens_of_one_step_are_one_message_that_came_with_the_last() -> None:
    assert last_of_step([10, 20, 21, 22], 3) == [10, 22]
    assert last_of_step([10, 20], 1) == [10, 20]
    assert last_of_step([10, 11], 2) == [11]


def test_an_answer_has_the_tokens_that_were_asked_for() -> None:
    ask, answer = Ask((1, 2), 3), Answer(0, (1, 2), 3)
    assert checked(answer, ask) is answer


@pytest.mark.parametrize("answer", [Answer(0, (1, 2), 2), Answer(0, (1, 2, 3, 4), 4), Answer(0, (1,), 3)])
def test_other_answers_are_refused(answer: Answer) -> None:
    with pytest.raises(RuntimeError, match="asked for 3 tokens"):
        checked(answer, Ask((1, 2), 3))
