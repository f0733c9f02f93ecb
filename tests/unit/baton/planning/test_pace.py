"""One factor for all of a machine's prompts: from jobs whose time was their own, whatever a few of them took."""

from collections.abc import Sequence

import pytest

from baton.planning.pace import Pace, computed_s
from baton.results.prefill_trace import RankTiming
from baton.types import TokenRange


def timing(tokens: TokenRange, start_s: float, seconds: float, *, rank: int = 0, wait_s: float = 0.0) -> RankTiming:
    start_ns, end_ns = round(start_s * 1e9), round((start_s + seconds) * 1e9)
    return RankTiming(rank, tokens, start_ns, end_ns, wait_s, 0, 0, 0, 0, ())


def predict(chunks: Sequence[TokenRange]) -> list[float]:
    """A token takes a millisecond."""
    return [len(chunk) / 1000 for chunk in chunks]


def paced(*jobs: tuple[int, float, float]) -> Pace:
    """The pace after jobs on one rank: tokens, start, seconds."""
    pace = Pace()
    for num_tokens, start_s, seconds in jobs:
        pace.observe("chain", [timing(TokenRange(0, num_tokens), start_s, seconds)], predict)
    return pace


def test_nothing_observed_changes_nothing() -> None:
    assert Pace().factor == 1.0


def test_what_jobs_took_counts_from_the_first_one_on() -> None:
    assert paced((100, 1, 0.3)).factor == pytest.approx(3)
    assert paced((100, 1, 0.02)).factor == pytest.approx(0.2)


def test_a_few_disturbed_jobs_do_not_count() -> None:
    jobs = [(100, float(at), 0.3 if at % 3 else 5.0) for at in range(1, 10)]
    assert paced(*jobs).factor == pytest.approx(3)


def test_long_jobs_count_for_more_than_short_ones() -> None:
    """Short ones mostly pay for what no model of tokens tells."""
    jobs = [*((5, float(at), 0.1) for at in range(1, 11)), (1000, 20.0, 2.5)]
    assert paced(*jobs).factor == pytest.approx(2.5)


def test_short_jobs_tell_what_each_takes_besides() -> None:
    pace = paced((10, 1, 0.35), (20, 2, 0.24), (1000, 3, 2.0))
    assert (pace.factor, pace.fixed_s) == pytest.approx((2, 0.2))
    assert paced((1000, 1, 2.0)).fixed_s == 0.0
    assert paced((10, 1, 0.01), (1000, 3, 2.0)).fixed_s == 0.0  # faster than the longer one


def test_nominal_rates_are_believed_until_a_job_is_longer_or_many_have_come() -> None:
    pace = Pace(believed_s=0.5)
    assert (len(pace), pace.factor, pace.fixed_s) == (0, 1.0, 0.0)
    pace.note(0.4, 0.1)
    assert (len(pace), pace.factor, pace.fixed_s) == pytest.approx((1, 1.0, 0.3))
    pace.note(1.2, 0.6)
    assert (len(pace), pace.factor, pace.fixed_s) == pytest.approx((2, 2.0, 0.2))
    many = Pace(believed_s=0.5)
    for _ in range(16):
        many.note(0.4, 0.1)
    assert (many.factor, many.fixed_s) == pytest.approx((4.0, 0.0))


def test_a_short_job_that_was_faster_than_predicted_is_believed_at_once() -> None:
    pace = Pace(believed_s=0.5)
    pace.note(0.05, 0.1)
    assert (pace.factor, pace.fixed_s) == pytest.approx((0.5, 0.0))


def test_what_is_passed_over_is_forgotten_and_what_is_supposed_stays() -> None:
    pace = Pace(believed_s=0.5)
    pace.note(30.0, 1.0)
    for _ in range(64):
        assert pace.factor == pytest.approx(30.0)
        pace.pass_over()
    assert (len(pace), pace.factor) == (0, 1.0)
    for _ in range(64):
        pace.pass_over()
    pace.note(0.4, 0.1)
    assert (len(pace), pace.factor) == (1, 1.0)


def test_what_was_long_ago_is_forgotten() -> None:
    jobs = [(100, float(at), 0.1 if at <= 50 else 0.4) for at in range(1, 67)]
    assert paced(*jobs).factor == pytest.approx(4)


@pytest.mark.parametrize(("seconds", "factor"), [(1e4, 32.0), (1e-6, 1 / 32)])
def test_a_factor_has_bounds(seconds: float, factor: float) -> None:
    assert paced((100, 1, seconds)).factor == factor


def test_a_wait_is_no_work_and_the_rank_that_did_best_counts() -> None:
    first = timing(TokenRange(0, 100), 1.0, 0.3)
    last = timing(TokenRange(100, 200), 1.0, 0.9, rank=1, wait_s=0.4)
    assert computed_s(last) == pytest.approx(0.5)
    pace = Pace()
    pace.observe("chain", [last, first], predict)
    assert pace.factor == pytest.approx(3)


def test_a_job_that_was_overtaken_does_not_count_on_that_rank() -> None:
    overtaker = (10, 1.5, 0.02)
    assert paced(overtaker, (100, 1.0, 0.7)).factor == pytest.approx(2)
    pace = paced(overtaker)
    ranks = [timing(TokenRange(0, 100), 1.0, 0.7), timing(TokenRange(100, 200), 1.0, 0.5, rank=1)]
    pace.observe("chain", ranks, predict)
    assert pace.factor == pytest.approx(5)


def test_groups_are_apart() -> None:
    pace = paced((10, 1.5, 0.02))
    pace.observe("other", [timing(TokenRange(0, 100), 1.0, 0.7)], predict)
    assert pace.factor == pytest.approx(7)


@pytest.mark.parametrize("seconds", [0.0, 0.1])
def test_what_takes_no_time_tells_nothing(seconds: float) -> None:
    pace = Pace()
    pace.observe("chain", [timing(TokenRange(0, 10), 1.0, seconds)], lambda chunks: [0.0 if seconds else 1.0])
    assert pace.factor == 1.0
