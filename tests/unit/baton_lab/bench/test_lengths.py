"""Mixes of lengths: they have the medians and percentiles that they say."""

import numpy as np
import pytest

from baton_lab.bench.lengths import MIXES, Mix, Spread


@pytest.mark.parametrize(
    ("mix", "prompt", "output"), [("sharegpt", (1730, 5696), (415, 834)), ("long", (7059, 12985), (208, 371))]
)
def test_a_mix_has_the_percentiles_that_it_was_fitted_to(
    mix: str, prompt: tuple[int, int], output: tuple[int, int]
) -> None:
    generator = np.random.default_rng(1)
    for spread, expected in ((MIXES[mix].prompt, prompt), (MIXES[mix].output, output)):
        drawn = [spread.draw(generator) for _ in range(20_000)]
        assert np.percentile(drawn, (50, 90)) == pytest.approx(expected, rel=0.03)


def test_a_fixed_length_is_always_the_same() -> None:
    generator = np.random.default_rng(1)
    assert {MIXES["fixed"].prompt.draw(generator) for _ in range(50)} == {256}


def test_other_medians_keep_the_spread() -> None:
    mix = Mix(Spread(100, 0.5), Spread(10)).around(200, None)
    assert mix == Mix(Spread(200, 0.5), Spread(10))


def test_no_length_is_below_one() -> None:
    generator = np.random.default_rng(1)
    assert min(Spread(1, 3.0).draw(generator) for _ in range(100)) == 1
