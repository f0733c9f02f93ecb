"""Passages follow one another in the novels, and no two begin alike."""

import pytest

from benchmarks.support.passages import Passages


def test_passages_follow_one_another() -> None:
    passages = Passages(tuple(range(100)))
    assert passages.take(30) == tuple(range(30))
    assert passages.take(50) == tuple(range(30, 80))


def test_after_the_end_passages_begin_elsewhere() -> None:
    passages = Passages(tuple(range(100)))
    taken = [passages.take(40) for _ in range(20)]
    assert {len(each) for each in taken} == {40}
    assert len({each[:16] for each in taken}) == len(taken)


def test_equal_beginnings_are_passed_over() -> None:
    passages = Passages((*range(20), *range(20), *range(50, 90)))
    first, second = passages.take(20), passages.take(20)
    assert first[:16] != second[:16]


def test_texts_without_a_new_passage_are_refused() -> None:
    passages = Passages(tuple(range(41)))
    assert [passages.take(40)[0] for _ in range(2)] == [0, 1]
    with pytest.raises(ValueError, match="no new passage of 40 tokens"):
        passages.take(40)
    with pytest.raises(ValueError, match="no new passage of 50 tokens"):
        passages.take(50)
