"""Arrivals that wait for nobody, and what is counted of their fates."""

import math

from benchmarks.support.open_loop import Fate, arrival_times, percentile, throughput


def test_arrivals_come_at_their_rate_in_order_the_same_for_the_same_seed() -> None:
    times = list(arrival_times(50.0, 20.0, seed=1))
    assert times == sorted(times) == list(arrival_times(50.0, 20.0, seed=1))
    assert times != list(arrival_times(50.0, 20.0, seed=2))
    assert times[0] >= 0 and times[-1] < 20.0
    assert abs(len(times) - 1000) < 5 * math.sqrt(1000)


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert (percentile(values, 95), percentile(values, 99), percentile([7.0], 95)) == (95.0, 99.0, 7.0)
    assert math.isnan(percentile([], 95))


def test_only_what_was_served_in_time_and_within_the_window_counts() -> None:
    served = Fate(0.0, 1.0, 0.5, refused=False, in_time=True)
    late = Fate(1.0, 5.0, 4.0, refused=False, in_time=True)
    cut = Fate(1.0, 2.0, 1.5, refused=False, in_time=False)
    refused = Fate(1.0, 1.001, None, refused=True, in_time=False)
    assert throughput([served, late, cut, refused], 0.0, 4.0) == 0.25
    assert throughput([served, late, cut, refused], 1.0, 5.0) == 0.25
    assert (served.ttft_s, refused.ttft_s) == (0.5, math.inf)
