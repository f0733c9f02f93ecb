"""Width and order over time, by the cost model: short prompts gain, and long ones are done as they were promised."""

import random
from dataclasses import replace
from statistics import mean

import pytest

from baton.planning.cost_model import CostModel
from baton.planning.planner import ChainPlanner
from baton.types import TokenRange
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.tenants import Tenant
from tests.support.clusters.planners import planner_of
from tests.support.engines.chain_simulation import Arrival, Served, SimulatedGroup, mean_ttft_s

COST = CostModel(num_layers=10, linear_s=4e-5, pair_s=1.4e-8, kv_bytes=0, fixed_s=4e-3)
"""256 tokens: 0.15 s on one rank, 0.10 on each of two. 6,000: 5.0 s and 2.5."""
LONG, SHORT = 6000, 256


Policy = tuple[ChainPlanner, OrchestratorConfig]


def elastic(overtaking: float = 0.15) -> Policy:
    return planner_of(COST), OrchestratorConfig(overtaking=overtaking)


def first_come(max_ranks: int = 4) -> Policy:
    return planner_of(COST, max_ranks=max_ranks), OrchestratorConfig(elastic=False, overtaking=0.0)


def served_by(policy: Policy, num_ranks: int, arrivals: list[Arrival]) -> list[Served]:
    return SimulatedGroup(*policy, num_ranks).run(arrivals)


def alone_s(num_tokens: int, num_ranks: int) -> float:
    planner = planner_of(COST)
    return planner.ttft_s(planner.chunks(TokenRange(0, num_tokens), num_ranks))


def arrivals_at(load: float, num_ranks: int, seed: int) -> list[Arrival]:
    """Mostly short prompts, at random times, that keep one rank each busy for `load` of the time."""
    rng, at_s, arrivals = random.Random(seed), 0.0, []
    sizes = [100, SHORT, SHORT, 2000]
    rank_s = mean(alone_s(size, 1) for size in sizes)
    for _ in range(60):
        at_s += rng.expovariate(load * num_ranks / rank_s)
        arrivals.append(Arrival(at_s, rng.choice(sizes)))
    return arrivals


def test_short_prompts_behind_long_ones() -> None:
    planner = planner_of(replace(COST, fixed_s=1e-3))
    arrivals = [Arrival(0.0, LONG), Arrival(0.001, LONG), *(Arrival(0.2 + 0.2 * n, SHORT) for n in range(10))]
    configs = [OrchestratorConfig(elastic=elastic) for elastic in (True, False)]
    ours, theirs = (SimulatedGroup(planner, config, 2).run(arrivals) for config in configs)
    assert mean_ttft_s(theirs[2:]) > 3 * mean_ttft_s(ours[2:])
    assert mean_ttft_s(ours[:2]) < 1.15 * mean_ttft_s(theirs[:2])


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_at_every_load_near_the_better_of_all_ranks_and_one_each_and_over_all_loads_better(num_ranks: int) -> None:
    one_each = first_come(max_ranks=1)
    ours, wide, narrow = [], [], []
    for load in (0.2, 0.5, 0.9):
        arrivals = arrivals_at(load, num_ranks, seed=num_ranks)
        ours.append(mean_ttft_s(served_by(elastic(), num_ranks, arrivals)))
        wide.append(mean_ttft_s(served_by(first_come(), num_ranks, arrivals)))
        narrow.append(mean_ttft_s(served_by(one_each, num_ranks, arrivals)))
    for own_s, *pure_s in zip(ours, wide, narrow, strict=True):
        assert own_s <= 1.12 * min(pure_s)
    assert mean(ours) <= min(mean(wide), mean(narrow))


@pytest.mark.parametrize("overtaking", [0.0, 0.15, 1.0])
def test_an_endless_stream_of_short_prompts_delays_a_long_one_by_no_more_than_its_part(overtaking: float) -> None:
    gap_s = alone_s(SHORT, 2)  # as many as two ranks can serve: whoever lets all of them pass is never served
    arrivals = [Arrival(1e-3 + gap_s * n, SHORT) for n in range(100)]
    ours = served_by(elastic(overtaking), 2, [Arrival(0.0, LONG), *arrivals])
    turn_s = alone_s(SHORT, 1)
    assert ours[0].ttft_s <= alone_s(LONG, 2) * (1 + overtaking) + turn_s
    assert ours[0].ttft_s < arrivals[-1].at_s


@pytest.mark.parametrize("load", [0.8, 1.1])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_tenant_that_asks_for_20_times_as_much_hardly_delays_a_light_one(num_ranks: int, load: float) -> None:
    rng, light, heavy = random.Random(num_ranks), Tenant("light"), Tenant("heavy")
    arrivals = []
    for tenant, part in ((light, 1 / 21), (heavy, 20 / 21)):
        at_s = 0.0
        while (at_s := at_s + rng.expovariate(part * load * num_ranks / alone_s(SHORT, 1))) < 60:
            arrivals.append(Arrival(at_s, SHORT, tenant))
    arrivals.sort(key=lambda each: each.at_s)
    ours = served_by(elastic(), num_ranks, arrivals)
    as_one = served_by(elastic(), num_ranks, [replace(each, tenant=light) for each in arrivals])
    alone = served_by(elastic(), num_ranks, [each for each in arrivals if each.tenant is light])

    def of(tenant: Tenant, served: list[Served]) -> list[Served]:
        return [each for each, arrival in zip(served, arrivals, strict=True) if arrival.tenant is tenant]

    waited_s = mean_ttft_s(of(light, ours)) - mean_ttft_s(alone)
    assert waited_s < 1.2 * alone_s(SHORT, 1)  # the heavy one's first job, for the most part
    assert waited_s < 0.5 * (mean_ttft_s(of(light, as_one)) - mean_ttft_s(alone))
    assert mean_ttft_s(of(heavy, ours)) < 1.1 * mean_ttft_s(of(heavy, as_one))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_however_many_other_tenants_come_a_tenant_s_jobs_are_served_in_turn_with_theirs(num_ranks: int) -> None:
    gap_s = alone_s(SHORT, num_ranks)  # as many as the ranks can serve, each of a tenant of its own
    newcomers = [Arrival(1e-3 + gap_s * n, SHORT, Tenant(f"tenant-{n}")) for n in range(200)]
    busy = Tenant("busy")
    ours = served_by(elastic(), num_ranks, [*(Arrival(0.0, SHORT, busy) for _ in range(4)), *newcomers])
    done_s = [each.ttft_s for each in ours[:4]]
    assert done_s[-1] < newcomers[-1].at_s / 2


def test_dues_alone_end_an_endless_stream() -> None:
    gap_s = alone_s(SHORT, 2)
    arrivals = [Arrival(1e-3 + gap_s * n, SHORT) for n in range(100)]
    ours = served_by(elastic(overtaking=1e9), 2, [Arrival(0.0, LONG), *arrivals])
    assert ours[0].ttft_s < 2.2 * alone_s(LONG, 2)  # none that comes after its due is served first
    assert ours[0].ttft_s < arrivals[-1].at_s
