"""Costs of a device's prefills: from jobs whose time was their own, whatever a few of them took."""

import random
from dataclasses import replace

import pytest

from baton.planning.cost_model import CostModel
from baton.planning.gpus import gpu_rank
from baton.planning.hardware import derive
from baton.planning.prefill_costs import PrefillCosts, ranks_s
from baton.results.prefill_trace import RankTiming
from baton.types import TokenRange
from baton_lab.study.known_models import shape_of

LINEAR = CostModel(10, linear_s=1e-4, pair_s=0.0, kv_bytes=0, project_share=0.0)
CORE = CostModel(30, linear_s=4e-5, pair_s=3e-8, kv_bytes=768, project_share=0.1)
GPU = derive(shape_of("llama-3.1-8b"), gpu_rank("NVIDIA H200", 2))
LENGTHS = (64, 200, 700, 1500, 4000, 8000)


def alone_s(num_tokens: int, cost: CostModel, start: int = 0) -> float:
    return ranks_s([TokenRange(start, start + num_tokens)], cost)[0]


def timing(tokens: TokenRange, start_s: float, seconds: float, *, rank: int = 0, wait_s: float = 0.0) -> RankTiming:
    start_ns, end_ns = round(start_s * 1e9), round((start_s + seconds) * 1e9)
    return RankTiming(rank, tokens, start_ns, end_ns, wait_s, 0, 0, 0, 0, ())


def learnt(nominal: CostModel, *jobs: tuple[int, float]) -> PrefillCosts:
    """The costs after jobs of one rank: tokens and seconds."""
    costs = PrefillCosts(nominal)
    for num_tokens, seconds in jobs:
        costs.note([TokenRange(0, num_tokens)], 0, seconds)
    return costs


@pytest.mark.parametrize("nominal", [CORE, GPU], ids=["a core", "a gpu"])
@pytest.mark.parametrize("seed", range(5))
def test_each_rate_is_learnt_from_jobs_of_different_lengths(nominal: CostModel, seed: int) -> None:
    rng = random.Random(seed)
    rates = {name: getattr(nominal, name) * 2 ** rng.uniform(-1, 1) for name in ("linear_s", "pair_s", "issue_s")}
    true = replace(nominal, **rates)
    jobs = [(length, alone_s(length, true) * rng.uniform(0.98, 1.02)) for _ in range(2) for length in LENGTHS]
    costs = learnt(nominal, *jobs)
    for length in (100, 400, 3000, 6000):
        assert alone_s(length, costs.cost) == pytest.approx(alone_s(length, true), rel=0.1)
    assert alone_s(2000, costs.cost, 6000) == pytest.approx(alone_s(2000, true, 6000), rel=0.15)


def test_nothing_observed_changes_nothing() -> None:
    assert PrefillCosts(CORE).cost == CORE


def test_a_long_job_counts_from_the_first_one_on() -> None:
    for slower in (3.0, 0.4):
        costs = learnt(CORE, (2048, slower * alone_s(2048, CORE)))
        assert alone_s(1000, costs.cost) == pytest.approx(slower * alone_s(1000, CORE), rel=0.05)


def test_a_few_disturbed_jobs_hardly_count() -> None:
    jobs = [(2048, (5.0 if at % 4 == 0 else 1.0) * 3 * alone_s(2048, CORE)) for at in range(1, 13)]
    assert alone_s(2048, learnt(CORE, *jobs).cost) == pytest.approx(3 * alone_s(2048, CORE), rel=0.1)


def test_short_jobs_tell_what_each_takes_besides() -> None:
    jobs = [(length, alone_s(length, LINEAR) + 0.05) for length in (10, 20, 40, 1000, 10, 3000)]
    costs = learnt(LINEAR, *jobs)
    for length in (10, 100, 2000):
        assert alone_s(length, costs.cost) == pytest.approx(alone_s(length, LINEAR) + 0.05, rel=0.05)


def test_a_slow_short_job_does_not_change_long_ones() -> None:
    costs = learnt(LINEAR, (10, 0.3))
    assert alone_s(10, costs.cost) == pytest.approx(0.3, rel=0.1)
    assert alone_s(4000, costs.cost) == pytest.approx(alone_s(4000, LINEAR) + 0.3, rel=0.1)


def test_launches_are_learnt_apart_from_rates() -> None:
    jobs = [(64, 2 * alone_s(64, GPU)), (128, 2 * alone_s(128, GPU)), (4096, alone_s(4096, GPU))]
    costs = learnt(GPU, *jobs, *jobs)
    assert alone_s(100, costs.cost) == pytest.approx(2 * alone_s(100, GPU), rel=0.05)
    assert alone_s(6000, costs.cost) == pytest.approx(alone_s(6000, GPU), rel=0.05)


def test_what_was_long_ago_or_is_passed_over_is_forgotten() -> None:
    nominal_s = alone_s(2048, CORE)
    jobs = [(2048, (1.0 if at < 16 else 4.0) * nominal_s) for at in range(32)]
    assert alone_s(2048, learnt(CORE, *jobs).cost) == pytest.approx(4 * nominal_s, rel=0.05)
    costs = learnt(CORE, (2048, 9 * nominal_s))
    for _ in range(64):
        assert len(costs) == 1
        costs.pass_over()
    assert len(costs) == 0 and costs.cost == CORE


@pytest.mark.parametrize(("seconds", "factor"), [(1e6, 32.0), (1e-6, 1 / 32)])
def test_one_job_has_bounds(seconds: float, factor: float) -> None:
    costs = learnt(CORE, *[(2048, seconds)] * 16)
    assert alone_s(2048, costs.cost) == pytest.approx(factor * alone_s(2048, CORE), rel=0.05)


def test_a_wait_is_no_work_and_the_rank_that_did_best_counts() -> None:
    first = timing(TokenRange(0, 1000), 1.0, 2.7)
    last = timing(TokenRange(1000, 2000), 1.0, 9.0, rank=1, wait_s=4.0)
    assert last.computed_s == pytest.approx(5.0)
    costs = PrefillCosts(LINEAR)
    costs.observe("chain", [last, first])
    assert len(costs) == 1
    assert ranks_s([TokenRange(0, 1000), TokenRange(1000, 2000)], costs.cost)[0] == pytest.approx(2.7, rel=0.05)


def test_a_job_that_was_overtaken_does_not_count_on_that_rank() -> None:
    costs = PrefillCosts(LINEAR)
    costs.observe("chain", [timing(TokenRange(0, 1000), 5.0, 1.0)])
    costs.observe("chain", [timing(TokenRange(0, 1000), 1.0, 7.0)])
    assert len(costs) == 1
    costs.observe("other", [timing(TokenRange(0, 1000), 1.0, 7.0)])
    assert len(costs) == 2


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_what_takes_no_time_tells_nothing(seconds: float) -> None:
    assert learnt(CORE, (10, seconds)).cost == CORE


def test_jobs_that_leave_nothing_for_a_rate_leave_costs_that_are_valid() -> None:
    for nominal in (CORE, LINEAR):
        slow_s = 3 * alone_s(270, nominal)
        costs = learnt(nominal, (270, slow_s), (1088, 0.8 * slow_s))
        assert 0 < alone_s(1000, costs.cost) < 2 * alone_s(1000, nominal) + slow_s


def test_costs_are_fitted_once_for_some_jobs() -> None:
    costs = learnt(CORE, *[(1000, alone_s(1000, CORE))] * 16)
    before = costs.cost
    costs.note([TokenRange(0, 1000)], 0, 2 * alone_s(1000, CORE))
    assert costs.cost is before
    for _ in range(3):
        costs.note([TokenRange(0, 1000)], 0, 2 * alone_s(1000, CORE))
    assert costs.cost is not before
