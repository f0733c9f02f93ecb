"""A machine's cores are divided by what each way is predicted to serve."""

import dataclasses

import pytest

from baton.planning.calibration import nominal
from baton.planning.hardware import CPU_CORE, cpu_rank
from baton.planning.step_times import nominal_steps
from baton_lab.study.known_models import SHAPES
from deploy.machine.core_plans import MOST_RANKS, CorePlan, Costs, best_core_plan, core_plans

SHAPE = SHAPES["smollm2-135m"]
CORE = dataclasses.replace(CPU_CORE, linear_flops=2e11, pair_flops=1.6e11, memory_bandwidth=1e10)
SHARED = 1e10
"""One core reads memory as fast as all: more threads do not make steps faster that are bound by reading."""


def costs(bandwidth: float = SHARED) -> Costs:
    return Costs(
        prefill=lambda threads: nominal("smollm2-135m", "here", SHAPE, cpu_rank(threads, 2, CORE, bandwidth)),
        steps=lambda threads: nominal_steps("smollm2-135m", "here", SHAPE, cpu_rank(threads, 2, CORE, bandwidth)),
        num_slots=16,
    )


def test_every_core_has_one_thread() -> None:
    found = core_plans(costs(), 4, 99)
    assert [(plan.num_ranks, plan.engine_threads) for plan in found] == [(0, 4), (1, 3), (2, 2), (3, 1)]


@pytest.mark.parametrize(
    ("num_cores", "most_workers", "most_ranks"), [(1, 99, 0), (4, 2, 1), (64, 99, MOST_RANKS), (4, 0, 0)]
)
def test_ranks_are_limited(num_cores: int, most_workers: int, most_ranks: int) -> None:
    assert max(plan.num_ranks for plan in core_plans(costs(), num_cores, most_workers)) == most_ranks


def test_on_two_cores_one_engine_serves_most() -> None:
    together, apart = core_plans(costs(), 2, 99)
    assert best_core_plan([together, apart]) is together
    assert together.first_token_s < apart.first_token_s


def test_cores_that_memory_keeps_waiting_are_better_spent_on_a_chain() -> None:
    chosen = best_core_plan(core_plans(costs(), 8, 99))
    assert chosen.num_ranks


def test_where_reading_scales_with_cores_one_engine_is_best() -> None:
    assert not best_core_plan(core_plans(costs(8e10), 8, 99)).num_ranks


def test_of_ways_that_serve_alike_the_first_token_decides() -> None:
    most, nearly, fewer = CorePlan(1, 1, 10.0, 2.0), CorePlan(2, 1, 9.6, 1.0), CorePlan(3, 1, 9.0, 0.5)
    assert best_core_plan([most, nearly, fewer]) is nearly


def test_a_request_together_takes_its_prefill_and_its_share_of_the_steps() -> None:
    made = costs()
    plan = made.together(2)
    steps_s = 128 * made.steps(2).step_s(16, 1024 + 64) / 16
    assert 1 / plan.requests_per_s == pytest.approx(plan.first_token_s + steps_s)


def test_a_way_says_what_it_is() -> None:
    assert (
        str(CorePlan(0, 2, 1.26, 0.55)) == "one engine of 2 threads (1.3 requests a second, first token after 0.55 s)"
    )
    assert str(CorePlan(1, 1, 0.9, 1.1)).startswith("a chain of 1 rank and an engine of 1 thread (")
