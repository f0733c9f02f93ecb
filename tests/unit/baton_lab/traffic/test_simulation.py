"""The simulator against closed forms of queueing, and that it repeats itself."""

import dataclasses
import statistics

import numpy as np
import pytest

from baton.planning.cost_model import CostModel
from baton.planning.work_cost import WorkCost
from baton_lab.traffic.results import Results, Targets
from baton_lab.traffic.service import GroupSizes, RecallingPlanner
from baton_lab.traffic.simulation import UNBOUNDED, Simulation
from baton_lab.traffic.traces.generators import Lengths, bursty, steady
from baton_lab.traffic.traces.trace import Trace
from orchestrator.autoscaling.queueing import wait_for_servers
from orchestrator.requests.config import OrchestratorConfig
from tests.support.clusters.planners import costs_of, traffic_planner

TOKEN_S = 1e-3
STEP_S = 0.01
NUM_LAYERS = 50
FIRST_COME = dataclasses.replace(UNBOUNDED, elastic=False)
"""Prompts in the order of arrival, as the closed forms suppose."""


def flat_planner(step: WorkCost | None = None) -> RecallingPlanner:
    """Return a planner by which a prompt takes `TOKEN_S` a token and a step `STEP_S` whatever is in it."""
    cost = CostModel(NUM_LAYERS, linear_s=TOKEN_S / NUM_LAYERS, pair_s=0.0, kv_bytes=0, project_share=1.0)
    costs = costs_of(cost, step or WorkCost(STEP_S, 0.0, 0.0, 0.0))
    return RecallingPlanner(costs, max_ranks=1, max_tokens=4096)


def simulate(
    trace: Trace,
    planner: RecallingPlanner,
    allocation: tuple[int, int],
    *,
    num_slots: int = 3000,
    config: OrchestratorConfig = FIRST_COME,
) -> Results:
    return Simulation(trace, planner, GroupSizes(1, num_slots), allocation, config=config).run()


def poisson_prompts(rate: float, prompts: np.ndarray[tuple[int], np.dtype[np.int64]], outputs: int = 1) -> Trace:
    arrivals = np.cumsum(np.random.default_rng(5).exponential(1 / rate, len(prompts)))
    return Trace("poisson", arrivals, prompts, np.full(len(prompts), outputs))


@pytest.mark.parametrize(
    ("num_groups", "load", "num_prompts"), [(1, 0.6, 4000), pytest.param(4, 0.7, 8000, marks=pytest.mark.ci)]
)
def test_exponential_prompts_wait_as_erlang_says(num_groups: int, load: float, num_prompts: int) -> None:
    prompts = np.ceil(np.random.default_rng(7).exponential(500, num_prompts)).astype(np.int64)
    rate = load * num_groups / (prompts.mean() * TOKEN_S)
    results = simulate(poisson_prompts(rate, prompts), flat_planner(), (num_groups, 1))
    measured_s = float(np.mean(results.ttft_s - prompts * TOKEN_S))
    wait = wait_for_servers(num_groups, rate, float(prompts.mean()) * TOKEN_S)
    assert wait is not None
    assert measured_s == pytest.approx(wait.mean_s, rel=0.15)


def test_equal_prompts_wait_half_as_long() -> None:
    prompts = np.full(4_000, 500)
    rate = 0.5 / 0.5
    results = simulate(poisson_prompts(rate, prompts), flat_planner(), (1, 1))
    exact_s = 0.5 * 0.5 / (2 * (1 - 0.5))  # Pollaczek and Khinchine, for M/D/1
    assert float(np.mean(results.ttft_s)) - 0.5 == pytest.approx(exact_s, rel=0.1)


def test_each_prompt_waits_as_lindleys_recursion_says() -> None:
    prompts = np.ceil(np.random.default_rng(3).exponential(500, 500)).astype(np.int64)
    results = simulate(poisson_prompts(1.8, prompts), flat_planner(), (1, 1))
    wait_s, exact_s = 0.0, []
    gaps_s = np.diff(results.trace.arrivals_s, append=0.0)
    for num_tokens, gap_s in zip(prompts, gaps_s, strict=True):
        exact_s.append(wait_s + num_tokens * TOKEN_S)
        wait_s = max(exact_s[-1] - gap_s, 0.0)
    assert results.ttft_s == pytest.approx(exact_s)


def test_rows_follow_littles_law() -> None:
    trace = steady(20.0, 200.0, 3, Lengths(10, 100))
    results = simulate(trace, flat_planner(WorkCost(STEP_S, 1e-5, 0.0, 0.0)), (4, 1))
    held_s = results.end_s - results.first_s
    mean_rows = float(held_s.sum()) / results.makespan_s
    step_s = results.gaps.percentile(50)
    token_rate = float((trace.output_tokens - 1).sum()) / results.makespan_s
    assert mean_rows == pytest.approx(token_rate * step_s, rel=0.05)


def test_a_row_gets_a_token_a_step() -> None:
    trace = Trace("one", np.zeros(1), np.array([10]), np.array([101]))
    results = simulate(trace, flat_planner(), (1, 1))
    assert results.ttft_s[0] == pytest.approx(10 * TOKEN_S)
    assert results.end_s[0] - results.first_s[0] == pytest.approx(100 * STEP_S)


def test_steps_grow_with_rows_and_keys_as_step_by_step() -> None:
    cost = WorkCost(STEP_S, 1e-4, 1e-6, 0.0)
    trace = Trace("two", np.array([0.0, 0.5]), np.array([100, 100]), np.array([201, 51]))
    results = simulate(trace, flat_planner(cost), (2, 1))
    assert results.end_s == pytest.approx(step_by_step(cost, results.first_s.tolist(), [101, 101], [200, 50]))


def step_by_step(cost: WorkCost, joins_s: list[float], contexts: list[int], left: list[int]) -> list[float]:
    """Return the instants of the last tokens of rows, one step after the other."""
    contexts, left, now_s = list(contexts), list(left), joins_s[0]
    ends_s = [0.0] * len(left)
    while any(left):
        rows = [row for row, join_s in enumerate(joins_s) if left[row] and join_s <= now_s]
        now_s += cost.plain_s(len(rows), statistics.mean(contexts[row] for row in rows))
        for row in rows:
            contexts[row] += 1
            left[row] -= 1
            if not left[row]:
                ends_s[row] = now_s
    return ends_s


def test_slots_bound_the_rows() -> None:
    trace = Trace("burst", np.zeros(8), np.full(8, 1), np.full(8, 101))
    results = simulate(trace, flat_planner(), (8, 1), num_slots=2)
    assert results.makespan_s == pytest.approx(4 * (TOKEN_S + 100 * STEP_S))


def test_a_full_queue_refuses() -> None:
    config = dataclasses.replace(FIRST_COME, max_queued_requests=3)
    trace = Trace("burst", np.zeros(8), np.full(8, 10), np.full(8, 11))
    results = simulate(trace, flat_planner(), (1, 1), num_slots=2, config=config)
    summary = results.summary(Targets(100.0, 100.0))
    assert summary["num_refused"] == 3
    assert summary["good_share"] == 5 / 8


def test_short_prompts_pass_long_ones_where_production_lets_them() -> None:
    trace = Trace("mixed", np.array([0.0, 0.0, 0.01]), np.array([4000, 4000, 100]), np.ones(3, dtype=np.int64))
    elastic = simulate(trace, flat_planner(), (1, 1), config=UNBOUNDED)
    in_order = simulate(trace, flat_planner(), (1, 1))
    assert elastic.ttft_s[2] < 0.1 * in_order.ttft_s[2]


def test_a_shorter_prompt_waits_for_the_layer_that_runs() -> None:
    layer_s = 4000 * TOKEN_S / NUM_LAYERS
    trace = Trace("two", np.array([0.0, 10.3 * layer_s]), np.array([4000, 10]), np.ones(2, dtype=np.int64))
    results = simulate(trace, flat_planner(), (1, 1), config=UNBOUNDED)
    assert results.first_s == pytest.approx([4010 * TOKEN_S, 11 * layer_s + 10 * TOKEN_S])


@pytest.mark.parametrize("num_output", [1, 20])
def test_a_first_token_is_sent_between_two_steps(num_output: int) -> None:
    trace = Trace("two", np.array([0.0, 0.3 * STEP_S]), np.array([10, 12]), np.array([50, num_output]))
    results = simulate(trace, flat_planner(), (2, 1))
    first_s, second_s = results.first_s
    assert first_s == pytest.approx(10 * TOKEN_S)
    assert second_s == pytest.approx(first_s + STEP_S)
    assert results.end_s[1] == pytest.approx(second_s + (num_output - 1) * STEP_S)


def test_cached_blocks_are_not_computed_again() -> None:
    blocks = ((1, 2, 3), (1, 2, 3))
    trace = Trace("chat", np.array([0.0, 5.0]), np.array([1500, 1500]), np.array([2, 2]), blocks)
    simulation = Simulation(trace, flat_planner(), GroupSizes(1, 4), (2, 1), config=FIRST_COME, max_blocks=100)
    results = simulation.run()
    assert results.num_cached_tokens == 1499
    assert results.ttft_s[1] < 0.01 * results.ttft_s[0]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_shortlist_serves_as_the_whole_chooser_does(num_ranks: int) -> None:
    trace = bursty(20.0, 15.0, seed=4)
    sizes, planner = GroupSizes(num_ranks, 16), traffic_planner("h100-flash", num_ranks)
    whole = Simulation(trace, planner, sizes, (3, 3), whole_chooser=True).run()
    listed = Simulation(trace, planner, sizes, (3, 3)).run()
    assert np.percentile(listed.ttft_s, [50, 95]) == pytest.approx(np.percentile(whole.ttft_s, [50, 95]), rel=0.05)
    assert np.percentile(listed.itl_s, [50, 95]) == pytest.approx(np.percentile(whole.itl_s, [50, 95]), rel=0.05)


def test_the_whole_chooser_finds_cached_blocks_too() -> None:
    trace = Trace("chat", np.array([0.0, 5.0]), np.array([1500, 1500]), np.array([2, 2]), ((1, 2, 3), (1, 2, 3)))
    results = Simulation(trace, traffic_planner("h100-flash"), GroupSizes(1, 4), (2, 1), whole_chooser=True).run()
    assert results.num_cached_tokens == 1024


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_equal_runs_are_equal(num_ranks: int) -> None:
    def run() -> Results:
        trace = bursty(30.0, 20.0, seed=4)
        sizes = GroupSizes(num_ranks, 16)
        return Simulation(trace, traffic_planner("h100-flash", num_ranks), sizes, (2, 3)).run()

    first, second = run(), run()
    assert np.array_equal(first.end_s, second.end_s)
    assert first.summary(Targets()) == second.summary(Targets())
    assert not np.isnan(first.end_s).any()
