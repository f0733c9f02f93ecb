"""A machine's cores or GPUs are divided by what each way is predicted to serve."""

import dataclasses

import pytest

from baton.planning.cost_model import LinkModel
from baton.planning.gpus import gpu_rank
from baton.planning.hardware import CPU_CORE, ModelCosts
from baton_lab.study.known_models import SHAPES
from deploy.machine.pool_plans import (
    MOST_RANKS,
    Costs,
    PoolPlan,
    best_plan,
    core_plans,
    gpu_plans,
    reason_for,
)

SHAPE = SHAPES["smollm2-135m"]
CORE = dataclasses.replace(CPU_CORE, linear_flops=2e11, pair_flops=1.6e11, memory_bandwidth=1e10)
SHARED = 1e10
"""One core reads memory as fast as all: more threads do not make steps faster that are bound by reading."""


def costs(bandwidth: float = SHARED) -> Costs:
    return Costs(lambda threads, part: ModelCosts.of(SHAPE, CORE.on_cores(threads, part * bandwidth)), num_slots=16)


def plans(*node_cores: int, bandwidth: float = SHARED, most_workers: int = 99) -> list[PoolPlan]:
    return core_plans(costs(bandwidth), node_cores, lambda plan: plan.num_workers <= most_workers)


def test_every_core_has_one_thread() -> None:
    """Unless the cores cannot be divided evenly."""
    sizes = {(plan.num_ranks, plan.rank_units, plan.num_engines, plan.engine_units) for plan in plans(4)}
    alone = {(0, 1, 1, 4), (0, 1, 2, 2), (0, 1, 3, 1), (0, 1, 4, 1)}
    one_engine = {(1, 1, 1, 3), (1, 2, 1, 2), (2, 1, 1, 2), (1, 3, 1, 1), (3, 1, 1, 1)}
    assert sizes == alone | one_engine | {(1, 2, 2, 1), (2, 1, 2, 1), (1, 1, 3, 1)}
    assert len(plans(4)) == len(sizes), "each division is tried once"


@pytest.mark.parametrize(
    ("num_cores", "most_workers", "most_ranks"), [(1, 99, 0), (4, 2, 1), (64, 99, MOST_RANKS), (4, 0, 0)]
)
def test_ranks_are_limited(num_cores: int, most_workers: int, most_ranks: int) -> None:
    assert max(plan.num_ranks for plan in plans(num_cores, most_workers=most_workers)) == most_ranks


def test_on_two_cores_one_engine_serves_most() -> None:
    together = best_plan(plans(2))
    (apart,) = (plan for plan in plans(2) if plan.num_chains)
    assert (together.num_chains, together.num_engines, together.engine_units) == (0, 1, 2)
    assert together.first_token_s < apart.first_token_s


def test_cores_that_memory_keeps_waiting_are_better_spent_on_a_chain() -> None:
    assert best_plan(plans(8)).num_ranks


def test_where_reading_scales_with_cores_one_engine_is_best() -> None:
    assert best_plan(plans(8, bandwidth=8e10)) == plans(8, bandwidth=8e10)[0]


def test_nodes_are_used_alike_and_a_worker_of_several_has_the_bandwidth_of_one() -> None:
    whole, *others = plans(6, 6, 4, bandwidth=3e10)
    assert (whole.num_workers, whole.engine_units, whole.num_nodes) == (1, 16, 3)
    assert whole.requests_per_s == costs(1e10).together(1, 16).requests_per_s
    assert {plan.num_nodes for plan in others} == {1, 2, 3}
    for plan in others:
        assert not plan.num_engines % plan.num_nodes and not plan.num_chains * plan.num_ranks % plan.num_nodes
        on_node = plan.num_engines * plan.engine_units + plan.num_chains * plan.num_ranks * plan.rank_units
        assert on_node <= plan.num_nodes * (4 if plan.num_nodes == 3 else 6)
    one, two = costs(1e10).together(1, 6), next(plan for plan in others if (plan.num_nodes, plan.num_engines) == (2, 2))
    assert two.requests_per_s == pytest.approx(2 * one.requests_per_s), "each node has its own bandwidth"
    assert any(plan.num_chains == 1 and plan.num_nodes == 2 for plan in others), "a chain over nodes"


def test_engines_of_a_node_share_its_bandwidth() -> None:
    made = {plan.num_engines: plan for plan in plans(8) if not plan.num_chains}
    alone = costs(SHARED / 4).together(1, 2)
    assert made[4].requests_per_s == pytest.approx(4 * alone.requests_per_s)


def test_of_ways_that_serve_alike_the_first_token_decides() -> None:
    most, nearly, fewer = (
        PoolPlan(1, 1, 1, 1, 10.0, 2.0),
        PoolPlan(1, 2, 1, 1, 9.6, 1.0),
        PoolPlan(1, 3, 1, 1, 9.0, 0.5),
    )
    assert best_plan([most, nearly, fewer]) is nearly
    assert best_plan([most, dataclasses.replace(nearly, answer_s=1.5), fewer]) is most


def test_a_request_together_takes_its_prefill_and_its_share_of_the_steps() -> None:
    made = costs()
    plan = made.together(1, 2)
    steps_s = 128 * made.of(2, 1.0).step.plain_s(16, 1024 + 64) / 16
    assert 1 / plan.requests_per_s == pytest.approx(plan.first_token_s + steps_s)


def test_a_way_says_what_it_is() -> None:
    together = PoolPlan(0, 0, 1, 2, 1.26, 0.55)
    assert str(together) == "1 engine of 2 threads (1.3 requests a second, first token after 0.55 s)"
    assert str(PoolPlan(1, 1, 1, 1, 0.9, 1.1)).startswith("1 chain of 1 rank and 1 engine of 1 thread (")
    assert str(PoolPlan(1, 2, 2, 4, 9, 1, rank_units=3)).startswith(
        "1 chain of 2 ranks of 3 threads and 2 engines of 4 threads ("
    )
    assert str(PoolPlan(2, 3, 2, 1, 9, 1, "GPU")).startswith("2 chains of 3 ranks and 2 engines of 1 GPU (")


def gpu_costs(push: LinkModel | None = None) -> Costs:
    """Costs of a model of 8 billion weights on an L4."""
    costs = ModelCosts.of(SHAPES["llama-3.1-8b"], gpu_rank("NVIDIA L4", 2))
    return Costs(lambda *_: costs, 16, unit="GPU", push=push)


@pytest.mark.parametrize(("num_gpus", "number"), [(1, 1), (2, 2), (4, 6), (8, 17)])
def test_every_gpu_has_one_worker_and_every_division_is_tried_once(num_gpus: int, number: int) -> None:
    found = gpu_plans(gpu_costs(), num_gpus)
    assert all(plan.num_chains * plan.num_ranks + plan.num_engines == num_gpus for plan in found)
    assert all(plan.num_engines for plan in found) and max(plan.num_ranks for plan in found) <= MOST_RANKS
    assert len({(plan.num_chains, plan.num_ranks) for plan in found}) == len(found) == number


def test_requests_count_all_engines_and_all_chains() -> None:
    made = gpu_costs()
    assert made.together(4, 1).requests_per_s == pytest.approx(4 * made.together(1, 1).requests_per_s)
    few, more_chains = made.apart(1, 1, 9, 1), made.apart(2, 1, 9, 1)
    assert more_chains.requests_per_s == pytest.approx(2 * few.requests_per_s), "the chain is what limits"
    one, two = made.apart(9, 1, 1, 1), made.apart(9, 1, 2, 1)
    assert two.requests_per_s == pytest.approx(2 * one.requests_per_s), "the engine is what limits"


def test_a_slow_link_to_the_engines_keeps_chains_back() -> None:
    """Pushed KV delays the first token and takes the link's time of every request."""
    near, far = gpu_costs().apart(1, 2, 6, 1), gpu_costs(LinkModel(0, 1e8)).apart(1, 2, 6, 1)
    kv_bytes = 1024 * 131_072
    assert near.first_token_s < kv_bytes / 1e8 / 2 < far.first_token_s
    assert far.requests_per_s < near.requests_per_s / 2
    assert best_plan(gpu_plans(gpu_costs(), 8)).num_chains
    assert not best_plan(gpu_plans(gpu_costs(LinkModel(0, 1e8)), 8)).num_chains


def test_a_choice_is_compared_with_the_best_of_the_other_kind() -> None:
    together, slow, fast = PoolPlan(0, 0, 1, 2, 9, 1), PoolPlan(1, 1, 1, 1, 1, 1), PoolPlan(1, 2, 1, 1, 2, 2)
    assert reason_for(together, [together, slow, fast]) == f"{together}, rather than {fast}"
    assert reason_for(together, [together]) == str(together)
