"""Prefill between decode steps, by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidArgumentError
from baton.planning.local_prefill import LocalPrefill

HALF_AS_LONG = LocalPrefill(speed=1.0, max_step_tokens=256)


def test_beside_no_rows_nothing_comes_in_between() -> None:
    assert HALF_AS_LONG.steps_s(3.0, 1000, 0.0) == 0.0


def test_each_chunk_waits_for_a_step_and_the_first_for_half_of_one_more() -> None:
    # 1 ms a token: beside steps of 100 ms, chunks of 50
    assert HALF_AS_LONG.steps_s(0.2, 200, 0.1) == pytest.approx(4.5 * 0.1)


def test_a_step_may_take_some_seconds_whatever_decoding_takes() -> None:
    # 1 ms a token: beside steps of 100 ms, chunks of 100
    assert LocalPrefill(1.0, 256, step_budget_s=0.4).steps_s(0.2, 200, 0.1) == pytest.approx(1.5 * 0.1)
    # steps of 200 ms: 3 decode steps are longer than the budget
    assert LocalPrefill(1.0, 256, step_budget_s=0.4).steps_s(0.6, 600, 0.2) == pytest.approx(3.5 * 0.2)


def test_chunks_are_no_longer_than_configured_and_no_shorter_than_a_few_tokens() -> None:
    assert HALF_AS_LONG.steps_s(0.512, 512, 10.0) == pytest.approx(2.5 * 10.0)
    assert HALF_AS_LONG.steps_s(0.160, 160, 0.001) == pytest.approx(10.5 * 0.001)


@given(
    prefill_s=st.floats(1e-3, 10.0),
    num_tokens=st.integers(1, 8000),
    step_s=st.floats(1e-4, 1.0),
    budget_s=st.floats(0, 3),
)
def test_a_longer_budget_is_never_later(prefill_s: float, num_tokens: int, step_s: float, budget_s: float) -> None:
    eager = LocalPrefill(1.0, 256, budget_s)
    assert eager.steps_s(prefill_s, num_tokens, step_s) <= HALF_AS_LONG.steps_s(prefill_s, num_tokens, step_s) + 1e-9


@pytest.mark.parametrize("numbers", [(0.0, 256, 0.0), (1.0, 256, -0.1), (1.0, 0, 0.0)])
def test_numbers_out_of_range_are_refused(numbers: tuple[float, int, float]) -> None:
    with pytest.raises(InvalidArgumentError, match="out of range"):
        LocalPrefill(*numbers)
