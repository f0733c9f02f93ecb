"""Queueing formulas against published values, special cases and each other."""

import math

import numpy as np
import pytest

from baton.errors import InvalidArgumentError
from orchestrator.autoscaling.queueing import erlang_c, poisson_p95, settled_rows, wait_for_servers


@pytest.mark.parametrize(("num_servers", "load", "probability"), [(1, 0.7, 0.7), (2, 1.0, 1 / 3), (3, 2.0, 4 / 9)])
def test_erlang_c_by_hand(num_servers: int, load: float, probability: float) -> None:
    assert erlang_c(num_servers, load) == pytest.approx(probability)


def test_one_server_waits_as_pollaczek_and_khinchine_say() -> None:
    rate, service_s, scv = 0.8, 1.0, 0.25
    wait = wait_for_servers(1, rate, service_s, service_scv=scv)
    assert wait is not None
    assert wait.mean_s == pytest.approx(rate * service_s**2 * (1 + scv) / (2 * (1 - rate)))


def test_a_saturated_pool_has_no_wait_to_predict() -> None:
    assert wait_for_servers(2, 2.0, 1.0) is None
    assert erlang_c(2, 3.0) == 1.0


def test_tail_and_percentile_agree() -> None:
    wait = wait_for_servers(4, 3.6, 1.0, service_scv=2.0, gap_scv=8.0)
    assert wait is not None
    assert wait.tail(wait.percentile(95)) == pytest.approx(0.05)
    assert wait.tail(-1.0) == 1.0
    few = wait_for_servers(4, 0.1, 1.0)
    assert few is not None and few.percentile(95) == 0.0


def test_rows_settle_where_littles_law_holds() -> None:
    def step_s(rows: float) -> float:
        return 0.01 + 0.001 * rows

    rows = settled_rows(500.0, step_s, 64)
    assert rows == pytest.approx(500 * 0.01 / (1 - 500 * 0.001))
    assert settled_rows(0.0, step_s, 64) == 0.0
    assert settled_rows(2000.0, step_s, 64) is None


@pytest.mark.parametrize("load", [0.9, 0.97, 0.995])
def test_many_servers_go_on_where_few_end(load: float) -> None:
    exact, limit = erlang_c(500, 500 * load), erlang_c(501, 501 * load)
    assert limit == pytest.approx(exact, rel=0.05, abs=0.003)


def test_a_poisson_count_stays_below_its_percentile() -> None:
    counts = np.random.default_rng(1).poisson(100, 10_000)
    assert (counts <= poisson_p95(100)).mean() == pytest.approx(0.95, abs=0.02)
    assert poisson_p95(0) == 0


def test_servers_that_cannot_be_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="num_servers"):
        erlang_c(0, math.nan)
