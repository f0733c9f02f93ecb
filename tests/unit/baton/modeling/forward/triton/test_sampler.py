"""Tokens that Triton's sampler draws for a batch equal those of `draw_row`, row by row, in Triton's interpreter."""

from datetime import date

import pytest

from tests.support.kernels.triton import sampler
from tests.support.kernels.triton.process import HAS_TRITON, Run

pytestmark = [pytest.mark.integration, pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")]
SIZES = (64, 97, 700, 2049, 4096)


@pytest.mark.parametrize("vocab_size", [pytest.param(each, marks=[pytest.mark.ci] * (each != 700)) for each in SIZES])
def test_tokens_are_those_of_each_row(interpreter: Run, vocab_size: int) -> None:
    for seed in range(1 if vocab_size == 700 else 4):
        interpreter(sampler.check_random, seed, 50, vocab_size, "cpu")


@pytest.mark.parametrize("num_parts", [1, 3])
def test_parts_of_a_row_change_no_token(interpreter: Run, num_parts: int) -> None:
    interpreter(_check_parts, num_parts)


def _check_parts(num_parts: int) -> None:
    sampler.check_random(5, 16, 9000, "cpu", num_parts=num_parts)


@pytest.mark.nightly
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("vocab_size", SIZES)
def test_tokens_of_many_rows_are_those_of_each_row(interpreter: Run, vocab_size: int, half: int) -> None:
    """8,000 rows in all, which are others each day, so that two weeks cover 100,000 rows."""
    interpreter(_check_many, vocab_size, 20 * date.today().toordinal() + 10 * half)


def _check_many(vocab_size: int, first_seed: int) -> None:
    num_rows = 100 if vocab_size < 2048 else 50  # the interpreter takes 0.05 to 0.2 s for a row
    for seed in range(first_seed, first_seed + 10):
        sampler.check_random(seed, num_rows, vocab_size, "cpu")


@pytest.mark.nightly
def test_tokens_of_a_large_vocabulary_are_those_of_each_row(interpreter: Run) -> None:
    for seed in range(20):
        interpreter(_check_large, seed)


def _check_large(seed: int) -> None:
    sampler.check_random(seed, 10, 128_256, "cpu", tile_tokens=32_768)


@pytest.mark.parametrize(
    "vocab_size", [pytest.param(1, marks=pytest.mark.ci), 97, pytest.param(5000, marks=pytest.mark.ci)]
)
def test_a_batch_has_rows_of_all_parameters(interpreter: Run, vocab_size: int) -> None:
    interpreter(sampler.check_mixed, vocab_size, "cpu")


def test_equal_logits_are_kept_by_their_ids(interpreter: Run) -> None:
    interpreter(sampler.check_equal, "cpu")


def test_other_rows_change_no_token(interpreter: Run) -> None:
    interpreter(sampler.check_other_rows, "cpu")


def test_rows_without_a_distribution(interpreter: Run) -> None:
    interpreter(sampler.check_without_distribution, "cpu")


def test_near_ties_are_decided_in_float64(interpreter: Run) -> None:
    interpreter(sampler.check_near_ties, "cpu")


def test_filters_keep_exactly_their_tokens(interpreter: Run) -> None:
    interpreter(sampler.check_limits_of_filters, "cpu")
