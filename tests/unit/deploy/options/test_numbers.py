"""Numbers of options: one spelling and one refusal for all commands."""

import pytest

from baton.errors import InvalidArgumentError
from deploy.options.numbers import ascending, assignments, count, counts, part, positive


def test_numbers_come_in_order_each_once() -> None:
    assert counts("--lengths", "512, 8,64,64", 1023) == (8, 64, 512)
    assert ascending("--budget", "0.5, 0.25,0.5", part) == (0.25, 0.5)


def test_k_is_1024() -> None:
    assert counts("--contexts", "4k,512, 1k", 4096) == (512, 1024, 4096)


@pytest.mark.parametrize("text", ["7", "1024", "1k", "64,", "8kk", "k", "-8", "8.0", "\u00b2", ""])
def test_whole_numbers_out_of_range_are_refused(text: str) -> None:
    expected = "^--lengths: '.*' is out of range: use whole numbers from 8 to 1023$"
    with pytest.raises(InvalidArgumentError, match=expected):
        counts("--lengths", text, 1023, least=8)


def test_zero_is_allowed_where_it_is_the_least() -> None:
    assert count("--mass", "0", 8, least=0) == 0
    with pytest.raises(InvalidArgumentError, match="use whole numbers from 1 to 8"):
        count("--rows", "0", 8)


@pytest.mark.parametrize("text", ["0", "-1", "inf", "nan", "much", ""])
def test_numbers_that_are_not_above_zero_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^--cost = '{text}' is out of range: use a number above 0$"):
        positive("--cost", text)


def test_a_number_may_be_zero_where_that_is_said() -> None:
    assert positive("--link-us", "0", or_zero=True) == 0.0
    for text in ("-1", "inf", "nan", ""):
        with pytest.raises(InvalidArgumentError, match=f"^--link-us = '{text}' is out of range: .* of at least 0$"):
            positive("--link-us", text, or_zero=True)


def test_a_part_is_no_more_than_the_whole() -> None:
    assert part("--most-share", "1") == 1.0
    with pytest.raises(InvalidArgumentError, match="^--ratios: 1.5 is out of range: use a part of 1$"):
        ascending("--ratios", "0.3,1.5", part)


def test_fields_are_assigned_whole_numbers() -> None:
    assert assignments("--shape", "num_layers=32, hidden = 64") == {"num_layers": 32, "hidden": 64}
    with pytest.raises(InvalidArgumentError, match="^--shape: 'hidden' is not FIELD=NUMBER"):
        assignments("--shape", "num_layers=32,hidden")
