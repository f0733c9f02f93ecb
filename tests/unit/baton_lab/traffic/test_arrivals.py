"""Arrival processes against their theory."""

import numpy as np
import pytest
from scipy import stats

from baton_lab.traffic.traces.arrivals import gamma_arrivals, gamma_arrivals_until, poisson

RATE = 50.0


@pytest.mark.parametrize("shape", [0.125, 0.5, 1.0, 4.0])
def test_gaps_are_gamma_distributed(shape: float) -> None:
    arrivals = gamma_arrivals(RATE, shape, 20_001, np.random.default_rng(3))
    gaps = np.diff(arrivals, prepend=0.0)
    # Eight at a time, because the shortest gaps of bursts are lost in what they are added to.
    assert stats.kstest(np.diff(arrivals[::8]), "gamma", args=(8 * shape, 0, 1 / (shape * RATE))).pvalue > 0.01
    assert gaps.mean() == pytest.approx(1 / RATE, rel=0.05)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(1 / shape, rel=0.1)
    # The gaps are independent of each other.
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.03


def test_other_gaps_are_told_from_gamma_distributed_ones() -> None:
    gaps = np.diff(gamma_arrivals(RATE, 0.5, 20_001, np.random.default_rng(3)))
    assert stats.kstest(gaps, "expon", args=(0, 1 / RATE)).pvalue < 1e-6


@pytest.mark.parametrize("is_renewal", [False, True])
def test_poisson_arrivals_have_poisson_counts(is_renewal: bool) -> None:
    generator = np.random.default_rng(5)
    arrivals = gamma_arrivals_until(400.0, RATE, 1.0, generator) if is_renewal else poisson(RATE, 400.0, generator)
    assert arrivals[0] >= 0 and arrivals[-1] < 400.0 and np.all(np.diff(arrivals) >= 0)
    counts, _ = np.histogram(arrivals, 400, (0.0, 400.0))
    assert counts.mean() == pytest.approx(RATE, rel=0.02)
    assert counts.var() == pytest.approx(RATE, rel=0.15)
    gaps = np.diff(arrivals)
    assert stats.kstest(gaps, "expon", args=(0, 1 / RATE)).pvalue > 0.01


def test_bursts_do_not_end_before_the_time_does() -> None:
    # So few gaps are drawn at once that these would end early: more have to be drawn.
    ends = [gamma_arrivals_until(1000.0, 1.0, 0.01, np.random.default_rng(seed)) for seed in range(40)]
    assert np.mean([len(each) for each in ends]) == pytest.approx(1000.0, rel=0.2)
    drawn = [gamma_arrivals(1.0, 0.01, 1700, np.random.default_rng(seed))[-1] for seed in range(40)]
    assert min(drawn) < 1000.0


def test_faster_arrivals_are_the_same_ones_in_proportion() -> None:
    slow, fast = (gamma_arrivals(rate, 0.5, 100, np.random.default_rng(7)) for rate in (1.0, 4.0))
    assert fast * 4 == pytest.approx(slow)
