"""Forecasts of traffic: rates, classes, changes and slopes."""

import numpy as np
import pytest

from orchestrator.autoscaling.traffic import LONG_S, TrafficWindow


@pytest.fixture
def window() -> TrafficWindow:
    return TrafficWindow()


def observe(window: TrafficWindow, rate: float, begin_s: float, end_s: float, tokens: int, *, seed: int = 1) -> None:
    generator = np.random.default_rng(seed)
    for arrival_s in np.sort(generator.uniform(begin_s, end_s, generator.poisson(rate * (end_s - begin_s)))):
        window.arrived(float(arrival_s), tokens)
        window.ended(tokens, 3 * tokens)


def test_a_steady_rate_is_forecast(window: TrafficWindow) -> None:
    observe(window, 20.0, 0.0, 60.0, 100)
    forecast = window.forecast(60.0, 30.0)
    assert forecast.rate == pytest.approx(20.0, rel=0.15)
    assert forecast.gap_scv == pytest.approx(1.0, abs=0.3)
    assert forecast.classes[0].outputs[0] == 300


def test_another_kind_of_request_is_seen_within_seconds(window: TrafficWindow) -> None:
    observe(window, 20.0, 0.0, 60.0, 6000)
    for second in range(60):
        window.forecast(float(second))
    observe(window, 40.0, 60.0, 64.0, 200)
    rates = {each.prompts[0]: each.rate for each in window.forecast(64.0).classes}
    assert rates[200] == pytest.approx(40.0, rel=0.25)
    assert rates.get(6000, 0.0) == 0.0


def test_a_slope_is_followed(window: TrafficWindow) -> None:
    for step in range(6):
        observe(window, 100.0 + 4 * step, 10.0 * step, 10.0 * step + 10, 100, seed=step)
    assert window.forecast(60.0, 30.0).rate > window.forecast(60.0).rate + 6 > 115


def test_answers_of_a_kind_that_comes_back_are_known(window: TrafficWindow) -> None:
    observe(window, 20.0, 0.0, 30.0, 6000)
    observe(window, 20.0, 200.0, 205.0, 200)
    window.arrived(205.0, 6000)
    outputs = {each.prompts[0]: set(each.outputs) for each in window.forecast(205.5).classes}
    assert outputs[6000] == {18000}


def test_bursts_are_seen_in_the_gaps(window: TrafficWindow) -> None:
    for burst in range(30):
        for _ in range(10):
            window.arrived(float(burst), 100)
    assert window.forecast(30.0).gap_scv > 4


def test_no_traffic_is_no_class(window: TrafficWindow) -> None:
    assert window.forecast(10.0).rate == 0.0


def test_what_was_cached_of_prompts_lately_is_forecast(window: TrafficWindow) -> None:
    for second in range(20):
        window.arrived(float(second), 1000)
        window.ended(1000, 50, 750 if second % 2 else 250)
    assert window.forecast(20.0).classes[0].cached_share == pytest.approx(0.5)


def test_unknown_answers_are_as_long_as_they_may_be(window: TrafficWindow) -> None:
    for second in range(5):
        window.arrived(float(second), 100, 8)
    assert set(window.forecast(5.0).classes[0].outputs) == {8}
    assert window.longest_output(100) == 8
    window.ended(100, 3)
    assert window.longest_output(100) == 3


def test_arrivals_that_no_forecast_needs_are_forgotten(window: TrafficWindow) -> None:
    for request in range(10_000):
        window.arrived(request * 0.1, 200)
    assert sum(len(each.arrivals_s) for each in window._classes.values()) <= 10 * LONG_S
    assert window.forecast(1000.0).rate == pytest.approx(10.0, rel=0.02)
