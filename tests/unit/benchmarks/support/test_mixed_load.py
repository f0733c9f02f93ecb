"""Arrivals of a mixed load, and the gaps between tokens of the streams beside it."""

import pytest

from benchmarks.support.mixed_load import Gaps, mixed, p99

MS = 1_000_000


def test_a_mixed_load_is_the_same_for_the_same_seed() -> None:
    assert mixed(3, 8, 2, 10.0) == mixed(3, 8, 2, 10.0)
    assert mixed(3, 8, 2, 10.0) != mixed(4, 8, 2, 10.0)


def test_a_mixed_load_begins_with_a_long_prompt_and_has_as_many_as_asked() -> None:
    arrivals = mixed(1, 20, 3, 10.0)
    sizes = [each.num_tokens for each in arrivals]
    assert sum(32 <= size <= 256 for size in sizes) == 20
    assert sum(2000 <= size <= 4000 for size in sizes) == 3
    assert arrivals[0].at_s == 0.0 and arrivals[0].num_tokens >= 2000
    assert [each.at_s for each in arrivals] == sorted(each.at_s for each in arrivals)
    assert max(each.at_s for each in arrivals) < 10.0
    assert len({each.seed for each in arrivals}) == 23


def test_no_two_rounds_share_a_prompt() -> None:
    assert not {each.seed for each in mixed(0, 8, 2, 1.0)} & {each.seed for each in mixed(1, 8, 2, 1.0)}


def test_gaps_are_those_within_streams_and_of_tokens_made_in_the_time() -> None:
    gaps = Gaps([[0, 10 * MS, 30 * MS, 35 * MS], [5 * MS, 25 * MS], [100 * MS]])
    assert gaps.between_ms(9 * MS, 31 * MS) == [10.0, 20.0, 20.0]
    assert gaps.between_ms(31 * MS, 200 * MS) == [5.0]


def test_the_ninety_ninth_percentile_is_exceeded_by_one_in_a_hundred() -> None:
    assert p99([float(number) for number in range(1, 201)]) == pytest.approx(198.0)
