"""Groups of several ranks in the simulator: chains alone, as the cost model predicts them, and chains beside others."""

import math
from dataclasses import replace

import pytest

from baton.planning.cost_model import CostModel, LinkModel
from baton.planning.hardware import derive
from baton.results.prefill_trace import WidthChoice
from baton.types import Rank, TokenRange
from baton_lab.study.known_hardware import HARDWARE
from baton_lab.study.known_models import SHAPES
from baton_lab.traffic.work.chain_turns import ChainTurns
from orchestrator.membership.prefill_queues import Pending
from orchestrator.placement.chain_width import ChainPlan, PromptChains
from orchestrator.requests.config import OrchestratorConfig
from tests.support.clusters.planners import planner_of

FLAT = CostModel(num_layers=4, linear_s=1.0, pair_s=0.0, kv_bytes=0, project_share=0.5)
"""A token takes a rank half a second until its KV can leave, and as long afterwards, in each layer."""
LATE_S = 1e6
REAL = derive(SHAPES["llama-3.1-8b"], HARDWARE["h100-flash"])


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("num_tokens", [50, 1000, 8000])
@pytest.mark.parametrize(
    "cost",
    [
        REAL,
        replace(REAL, head_s=0.02, push=LinkModel(1e-3, 1e9)),
        replace(REAL, link=LinkModel(1e-3, 1e9)),
        replace(REAL, num_layers=1),
        replace(REAL, num_layers=2, fixed_s=1e-3),
    ],
    ids=["real", "push", "slow-link", "one-layer", "two-layers"],
)
def test_a_chain_alone_takes_what_is_predicted(num_ranks: int, num_tokens: int, cost: CostModel) -> None:
    planner = planner_of(cost, max_ranks=num_ranks)
    config = OrchestratorConfig(elastic=False)
    plan = PromptChains(planner, config, TokenRange(0, num_tokens)).plan(num_ranks, (), 0.0)
    group = ChainTurns(num_ranks, cost)
    group.add(7, plan, 10.0)
    parts, jobs = group.advance(LATE_S)
    assert sorted(parts) == [(7, rank) for rank in range(num_ranks)]
    assert dict(jobs) == pytest.approx({7: 10.0 + plan.ttft_s}, rel=1e-3)
    assert not len(group)
    assert group.next_turn_s == math.inf


def plan_of(ranks: tuple[int, ...], num_tokens: int, due_s: float) -> ChainPlan:
    """A chain of so many tokens on each rank."""
    chunks = TokenRange(0, num_tokens * len(ranks)).split(num_tokens)
    places = tuple(map(Rank, ranks))
    job = Pending(due_s, due_s, dict.fromkeys(places, 0.0))
    return ChainPlan(places, tuple(chunks), job, WidthChoice(len(ranks), 2, 0, 0, ()), 0.0, planner_of(FLAT))


def test_a_chain_that_waits_for_kv_lets_others_take_a_whole_layer() -> None:
    group = ChainTurns(2, FLAT)
    group.add(1, plan_of((0,), 8, due_s=100.0), 0.0)  # its turns end at 4, 12, 20
    group.add(2, plan_of((1,), 6, due_s=100.0), 0.0)  # at 3, 9
    group.advance(5.0)
    group.add(3, plan_of((0, 1), 1, due_s=10.0), 5.0)
    # Rank 1 projects at 9, and needs what rank 0 projects from 12 to 12.5: meanwhile job 2 has rank 1 until 15.5. Then
    # rank 1 does 3 turns of a second, and half a second for the last token.
    ends_s = dict(group.advance(LATE_S)[1])
    assert ends_s[3] == pytest.approx(19.0)
    assert ends_s[2] > ends_s[3]


def test_equal_jobs_are_served_in_their_order() -> None:
    group = ChainTurns(2, FLAT)
    for number in (1, 2):
        group.add(number, plan_of((0, 1), 2, due_s=float(number)), 0.0)
    assert [number for number, _ in group.advance(LATE_S)[1]] == [1, 2]
