"""Fits find the numbers that made the points, and never a negative one."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidArgumentError
from planning.cost_model import Kernel, Link
from planning.fit import fit_link, fit_prefill

TOKENS = (256.0, 1024.0, 2048.0, 4096.0, 8192.0)


@given(
    linear_s=st.floats(1e-7, 1e-4),
    pair_s=st.floats(1e-11, 1e-8),
    fixed_s=st.floats(1e-5, 1e-2),
    num_layers=st.integers(1, 80),
    kernel=st.sampled_from(Kernel),
)
def test_prefill_numbers_come_back(
    linear_s: float, pair_s: float, fixed_s: float, num_layers: int, kernel: Kernel
) -> None:
    weight = 1.0 if kernel is Kernel.DENSE else 0.5
    points = [(n, num_layers * (fixed_s + linear_s * n + pair_s * weight * n * n)) for n in TOKENS]
    fitted = fit_prefill(points, num_layers, kernel)
    predicted = [num_layers * (fitted.fixed_s + fitted.linear_s * n + fitted.pair_s * weight * n * n) for n in TOKENS]
    assert predicted == pytest.approx([seconds for _, seconds in points], rel=1e-6)
    assert fitted.residual < 1e-6


def test_papers_one_gpu_row() -> None:
    """Half a percent off at most; 0.079 s a thousand tokens and 0.0207 s a thousand squared, all layers."""
    row = [(1024, 0.10), (2048, 0.24), (4096, 0.65), (8192, 1.95), (12288, 3.95)]
    fitted = fit_prefill(row, 32, Kernel.DENSE)
    assert fitted.residual < 0.01
    assert fitted.linear_s * 32 * 1024 == pytest.approx(0.079, rel=0.02)
    assert fitted.pair_s * 32 * 1024**2 == pytest.approx(0.02075, rel=0.02)


@pytest.mark.parametrize("seed", range(20))
def test_no_coefficient_is_negative_and_no_other_choice_fits_better(seed: int) -> None:
    """Noise drives plain least squares below zero; then the best non-negative numbers are found, as a grid confirms."""
    rng = np.random.default_rng(seed)
    points = [(n, float(n * 1e-3 * rng.uniform(0.7, 1.3))) for n in (1.0, 2.0, 3.0, 4.0)]
    fitted = fit_prefill(points, 1, Kernel.DENSE)

    def error(linear_s: float, pair_s: float, fixed_s: float) -> float:
        return sum(((fixed_s + linear_s * n + pair_s * n * n) / seconds - 1) ** 2 for n, seconds in points)

    found = error(fitted.linear_s, fitted.pair_s, fitted.fixed_s)
    assert min(fitted.linear_s, fitted.pair_s, fitted.fixed_s) >= 0
    grid = itertools.product(np.linspace(0, 2e-3, 25), np.linspace(0, 4e-4, 25), np.linspace(0, 2e-3, 25))
    assert found <= min(error(*each) for each in grid) + 1e-12


@given(latency_s=st.floats(1e-6, 1e-2), bandwidth=st.floats(1e6, 1e12))
def test_link_numbers_come_back(latency_s: float, bandwidth: float) -> None:
    link = Link(latency_s, bandwidth)
    points = [(size, link.seconds(size)) for size in (1e3, 1e5, 1e7, 1e9)]
    fitted = fit_link(points)
    assert fitted.residual < 1e-6
    assert [fitted.link.seconds(size) for size, _ in points] == pytest.approx([s for _, s in points], rel=1e-6)


@pytest.mark.parametrize(
    ("points", "text"),
    [
        ([], "0 given"),
        ([(64.0, 1.0), (64.0, 1.1)], "fewer than 2 different sizes"),
        ([(64.0, 1.0), (128.0, 0.0)], "above 0"),
        ([(64.0, 1.0), (128.0, 0.5)], "larger messages took no longer"),
    ],
)
def test_points_that_say_nothing_are_refused(points: list[tuple[float, float]], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        fit_link(points)
