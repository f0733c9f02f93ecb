"""What the supervisor and the orchestrator tell each other arrives as it was: views, orders, and what predicts."""

import functools
from dataclasses import replace

import pytest

from baton.errors import ConfigError
from baton.planning.cost_model import CostModel, LinkModel
from baton.planning.device_profile import nominal_core, nominal_gpu
from baton.planning.hardware import ModelCosts, cpu_rank
from baton.planning.local_prefill import LocalPrefill
from baton.planning.model_shape import ModelShape
from baton.planning.planner import ChainPlanner
from baton.planning.work_cost import WorkCost
from baton.results.prefill_trace import RankTiming
from baton.types import MAX_EPOCH, Epoch, TokenRange
from baton.v1 import keeping_pb2 as pb
from baton_lab.study.known_models import SHAPES
from orchestrator.api.keeping import (
    orders_from_proto,
    orders_to_proto,
    planner_from_proto,
    predictions_to_proto,
    view_from_proto,
    view_to_proto,
)
from orchestrator.membership.view import AbsentGroup, ClusterView, EndedWorker, GenerationGroup, Orders, PrefillGroup
from tests.support.clusters.planners import linear_planner

VIEW = ClusterView(
    prefill=(PrefillGroup("p", ("h:1", "h:2"), Epoch(MAX_EPOCH), False, "store", "layout", nominal_core(4)),),
    generation=(
        GenerationGroup("g", "h:3", "layout", 4, 64, False, "store", "window", True, nominal_gpu("NVIDIA L4", 2)),
        GenerationGroup("other", "h:4", "", 1, 1),
    ),
    absent=(AbsentGroup("gone", "generate", True, "no room"), AbsentGroup("left", "prefill")),
    ended=(EndedWorker("h:5"), EndedWorker("h:6", ("00ff", "01"))),
)
ORDERS = Orders(
    *(frozenset({"p", "g"}), frozenset({"g"}), frozenset({"more"})), {"more": "/models/other"}, {"more": "p.1"}
)


@pytest.mark.parametrize("view", [VIEW, ClusterView()])
def test_a_view_arrives_as_it_was_and_lives_are_the_same(view: ClusterView) -> None:
    arrived = view_from_proto(pb.ClusterView.FromString(view_to_proto(view).SerializeToString()))
    assert arrived == view
    assert {group.incarnation: group.name for group in arrived.groups} == {
        group.incarnation: group.name for group in view.groups
    }


@pytest.mark.parametrize("orders", [ORDERS, Orders()])
def test_orders_arrive_as_they_were(orders: Orders) -> None:
    assert orders_from_proto(pb.Orders.FromString(orders_to_proto(orders).SerializeToString())) == orders


COSTS = ModelCosts(
    ModelShape(2, 24, 6, 3, 4, 48, 100, gated=False, dtype_bytes=4, num_experts=8, num_active_experts=2),
    CostModel(
        2,
        linear_s=1e-3,
        pair_s=2e-6,
        kv_bytes=96,
        project_share=0.3,
        fixed_s=4e-4,
        issue_s=5e-5,
        head_s=6e-3,
        copy_s=7e-7,
        link=LinkModel(8e-4, 9e6),
    ),
    WorkCost(0.01, 0.02, 0.03, 0.04),
    1.25,
)
"""Every field has a value of its own, which is not its default."""


def arrived(planner: ChainPlanner) -> ChainPlanner:
    return planner_from_proto(pb.Predictions.FromString(predictions_to_proto(planner).SerializeToString()))


@pytest.mark.parametrize("costs", [COSTS, ModelCosts.of(SHAPES["smollm2-135m"], cpu_rank(1, 2))], ids=["odd", "real"])
def test_a_planner_arrives_with_its_knots_and_predicts_alike(costs: ModelCosts) -> None:
    local = LocalPrefill(2.0, 64, step_budget_s=0.25)
    sent = ChainPlanner(costs, max_ranks=3, max_tokens=300, local=local, devices=frozenset({"here", "there"}))
    got = arrived(sent)
    assert got.nominal == costs
    assert (got.max_ranks, got.max_tokens, got.local) == (3, 300, local)
    assert (got.table, got.devices) == (sent.table, sent.devices)
    assert got.table.knots.keys() == {2, 3}
    assert got.chunks(TokenRange(0, 300), 3) == sent.chunks(TokenRange(0, 300), 3)
    assert got.ttft_s([TokenRange(5, 90)]) == sent.ttft_s([TokenRange(5, 90)])
    assert got.step_s(3, 50) == sent.step_s(3, 50)
    profile = nominal_core(4)
    assert got.for_device(profile).nominal == sent.for_device(profile).nominal


def test_links_without_limits_arrive_so() -> None:
    costs = replace(COSTS, prefill=replace(COSTS.prefill, link=LinkModel()))
    assert arrived(ChainPlanner(costs, max_ranks=1, max_tokens=10)).nominal == costs


def test_what_a_planner_lacks_it_lacks_on_the_other_side() -> None:
    got = arrived(linear_planner())
    assert got.local is None and got.devices == frozenset()
    assert got.nominal == linear_planner().nominal


def test_what_a_planner_has_observed_does_not_arrive() -> None:
    sent = ChainPlanner(COSTS, max_ranks=1, max_tokens=10)
    sent.observe("chain", [RankTiming(0, TokenRange(0, 1000), 0, 100 * 10**9, 0.0, 0, 0, 0, 0, ())])
    assert sent.cost != COSTS.prefill
    assert arrived(sent).cost == COSTS.prefill


@pytest.mark.parametrize(
    ("place", "value", "text"),
    [
        ("prefill.linear_s", -2.0, "linear_s = -2.0 is out of range"),
        ("prefill.link.bandwidth", -1.0, "bandwidth = -1.0 is out of range"),
        ("step.token_s", -1.0, "token_s = -1.0 is out of range"),
        ("shape.num_kv_heads", 5, "num_heads = 6 is not a multiple"),
    ],
)
def test_costs_that_are_out_of_range_are_refused_by_name(place: str, value: float, text: str) -> None:
    message = predictions_to_proto(ChainPlanner(COSTS, max_ranks=1, max_tokens=10))
    *parts, name = place.split(".")
    setattr(functools.reduce(getattr, parts, message.nominal), name, value)
    with pytest.raises(ConfigError, match=text):
        planner_from_proto(message)
