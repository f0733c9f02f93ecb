"""What the supervisor and the orchestrator tell each other arrives as it was: views, orders, and what predicts."""

from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.planning.calibration import nominal
from baton.planning.device_profile import nominal_core, nominal_gpu
from baton.planning.hardware import cpu_rank
from baton.planning.local_prefill import LocalPrefill
from baton.planning.planner import ChainPlanner
from baton.planning.step_times import nominal_steps
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


def test_a_planner_arrives_with_its_knots_and_predicts_alike() -> None:
    shape, rates = SHAPES["smollm2-135m"], cpu_rank(1, 2)
    steps = nominal_steps("m", "here", shape, rates, weight_bytes=None)
    calibration = nominal("m", "here", shape, rates)
    local = LocalPrefill(2.0, 64, step_budget_s=0.25)
    sent = ChainPlanner(calibration, max_ranks=3, max_tokens=300, steps=steps, local=local)
    message = pb.Predictions.FromString(predictions_to_proto(sent, Path("/kept/it.json")).SerializeToString())
    assert message.calibration_path == "/kept/it.json"
    got = planner_from_proto(message)
    assert (got.calibration, got.steps, got.local, got.table) == (calibration, steps, sent.local, sent.table)
    assert got.chunks(TokenRange(0, 300), 3) == sent.chunks(TokenRange(0, 300), 3)


def test_what_a_planner_lacks_it_lacks_on_the_other_side() -> None:
    message = predictions_to_proto(linear_planner(), None)
    assert message.calibration_path == ""
    got = planner_from_proto(message)
    assert got.steps is None and got.local is None


def test_damaged_texts_are_refused_by_name() -> None:
    message = predictions_to_proto(linear_planner(), None)
    message.calibration = "{half"
    with pytest.raises(ConfigError, match="calibration: is not valid JSON"):
        planner_from_proto(message)
