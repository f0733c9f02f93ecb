"""Rates and quantiles between two samples of a cluster."""

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from baton.calls.cluster_state import ClusterState, GenerationStatus, GroupState, PrefillStatus
from deploy.top.rates import between
from deploy.top.sampling import Snapshot, buckets, parsed, quantile

BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5)


def state(num_steps: int, num_jobs: int) -> ClusterState:
    ranks = {0: PrefillStatus(num_jobs_done=99), 1: PrefillStatus(num_jobs_done=num_jobs)}
    groups = (
        GroupState("g", "generate", (), 0, True, 0, 0, generation=GenerationStatus(num_steps=num_steps)),
        GroupState("p", "prefill", (), 0, True, 0, 0, ranks=ranks),
    )
    return ClusterState(groups, 0, 0, 0, "v")


def metrics(requests: int, prompt: int, output: int, cached: int) -> str:
    return (
        f'baton_requests_total{{error=""}} {requests - 1}\nbaton_requests_total{{error="BatonError"}} 1\n'
        f'baton_tokens_total{{type="input"}} {prompt}\nbaton_tokens_total{{type="output"}} {output}\n'
        f'baton_cached_tokens_total {cached}\nbaton_prefix_read_bytes_total{{group="g",tier="disk"}} {cached * 8}\n'
    )


def test_rates_are_differences_over_the_time_between() -> None:
    before = Snapshot(10.0, state(100, 7), parsed(metrics(5, 100, 50, 10)))
    after = Snapshot(14.0, state(180, 8), parsed(metrics(9, 300, 90, 60)))
    rates = between(before, after)
    assert rates is not None
    assert (rates.requests, rates.prompt_tokens, rates.output_tokens, rates.refused) == (1.0, 50.0, 10.0, 0.0)
    assert rates.cached_share == pytest.approx(50 / 200)
    assert (rates.steps, rates.jobs) == ({"g": 20.0}, {"p": 0.25})
    assert rates.read_bytes == {"memory": 0.0, "disk": 100.0}
    assert rates.first_token_s == (None, None)


def test_there_are_no_rates_across_a_restart() -> None:
    before, after = (Snapshot(at, state(1, 1), parsed(metrics(num, 1, 1, 1))) for at, num in ((1.0, 9), (2.0, 3)))
    assert between(before, after) is None and between(after, after) is None
    younger = between(Snapshot(1.0, state(50, 5), {}), Snapshot(2.0, state(3, 6), {}))
    assert younger is not None and younger.steps == {} and younger.jobs == {"p": 1.0}


def scraped(values: list[float]) -> str:
    registry = CollectorRegistry()
    histogram = Histogram("took_seconds", "text", buckets=BOUNDS, registry=registry)
    for value in values:
        histogram.observe(value)
    return generate_latest(registry).decode()


def test_quantiles_are_of_what_was_observed_between_the_samples() -> None:
    first = [2.0] * 50
    later = [float(each) for each in np.random.default_rng(1).uniform(0.0, 1.0, 4000)]
    found = buckets(parsed(scraped(first)), parsed(scraped(first + later)), "took_seconds")
    assert found[-1] == (float("inf"), 4000)
    for share in (0.1, 0.5, 0.95):
        assert quantile(share, found) == pytest.approx(np.quantile(later, share), abs=0.02)


def test_a_quantile_beyond_the_last_bound_is_that_bound() -> None:
    assert quantile(0.9, [(1.0, 1), (2.0, 2), (float("inf"), 10)]) == 2.0
    assert quantile(0.5, [(1.0, 0), (float("inf"), 0)]) is None
    assert quantile(0.5, []) is None
    assert quantile(0.5, [(1.0, 0), (2.0, 4), (float("inf"), 4)]) == 1.5
