"""The autoscaler's decisions, by its own predictions, and the predictions against the simulator."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from baton.errors import ConfigError
from baton.planning.step_cost import LearntCosts
from baton.planning.work_cost import WorkCost
from baton_lab.traffic.results import Targets
from baton_lab.traffic.service import GroupSizes, RecallingPlanner
from baton_lab.traffic.simulation import Simulation
from baton_lab.traffic.traces.generators import OUTPUT_HEAVY, PROMPT_HEAVY, Lengths, steady
from orchestrator.autoscaling.actions import FleetState, LeadTimes, Move
from orchestrator.autoscaling.allocation import cheapest_within_targets, most_good
from orchestrator.autoscaling.autoscaler import PATIENCE_S, Autoscaler
from orchestrator.autoscaling.demand import Backlog, ServiceModel
from orchestrator.autoscaling.prediction import Allocation, Predictor
from orchestrator.autoscaling.traffic import TrafficClass, TrafficForecast
from orchestrator.requests.config import AutoscalingConfig
from tests.support.clusters.planners import traffic_planner

CONFIG = AutoscalingConfig(ttft_p95_s=2.0, itl_p95_s=0.02, min=2, max=8, cooldown_s=20.0)
TIMES = LeadTimes(cold_start_s=30.0, flip_s=2.0)
NO_WORK = Backlog()


@pytest.fixture(scope="module")
def planner() -> RecallingPlanner:
    return traffic_planner("h100-flash")


@pytest.fixture(scope="module")
def service(planner: RecallingPlanner) -> ServiceModel:
    return ServiceModel(planner, 1, 16)


@pytest.fixture(scope="module")
def chains() -> ServiceModel:
    """Chains of two ranks."""
    return ServiceModel(traffic_planner("h100-flash", max_ranks=2), 2, 16)


def test_costs_that_groups_have_learnt_replace_the_planner_s(service: ServiceModel) -> None:
    learnt = {
        name: LearntCosts(WorkCost(step_s, 0.25, 1e-3, 0.0), WorkCost(9.0, 9.0, 9.0, 9.0), 9.0, num_steps)
        for name, step_s, num_steps in (("a", 1.0, 1000), ("b", 3.0, 1000), ("new", 9.0, 10))
    }
    assert dataclasses.replace(service, step_costs=learnt).step_s(4, 100) == pytest.approx(2.0 + 4 * (0.25 + 0.1))
    learnt = {"new": learnt["new"]}
    assert dataclasses.replace(service, step_costs=learnt).step_s(4, 100) == service.step_s(4, 100)


def forecast(rate: float, prompt: int = 6000, output: int = 64) -> TrafficForecast:
    return TrafficForecast((TrafficClass(rate, (prompt,), (output,)),))


def watched(service: ServiceModel, config: AutoscalingConfig, rate: float, kind: Lengths, seconds: float) -> Autoscaler:
    """An autoscaler that has seen traffic up to `seconds`."""
    autoscaler = Autoscaler(config, service, TIMES)
    see(autoscaler, rate, kind, 0.0, seconds)
    return autoscaler


def see(autoscaler: Autoscaler, rate: float, kind: Lengths, begin_s: float, end_s: float) -> None:
    for arrival_s in np.arange(begin_s, end_s, 1 / rate):
        autoscaler.window.arrived(float(arrival_s), int(kind.prompt))
        autoscaler.window.ended(int(kind.prompt), int(kind.output))


@pytest.mark.parametrize(
    ("kind", "rate", "split"),
    [(PROMPT_HEAVY, 20.0, (6, 2)), (PROMPT_HEAVY, 15.0, (5, 3)), (OUTPUT_HEAVY, 30.0, (1, 7))],
)
def test_predictions_agree_with_the_simulator(
    planner: RecallingPlanner, service: ServiceModel, kind: Lengths, rate: float, split: tuple[int, int]
) -> None:
    trace = steady(rate, 60.0, 1, kind)
    summary = Simulation(trace, planner, GroupSizes(1, 16), split).run().summary(Targets())
    seen = TrafficClass(len(trace) / 60, tuple(trace.prompt_tokens.tolist()), tuple(trace.output_tokens.tolist()))
    predicted = Predictor(service, TrafficForecast((seen,)), CONFIG).predict(Allocation(*split))
    assert predicted.ttft_p95_s == pytest.approx(summary["ttft_s"]["p95"], rel=0.25, abs=0.02)
    assert predicted.itl_p95_s == pytest.approx(summary["itl_s"]["p95"], rel=0.15)


def test_more_groups_never_predict_worse(service: ServiceModel) -> None:
    predictor = Predictor(service, forecast(15.0), CONFIG)
    for num_generate in range(2, 5):
        times = [predictor.predict(Allocation(num, num_generate)) for num in range(2, 8)]
        assert [each.ttft_p95_s for each in times] == sorted((each.ttft_p95_s for each in times), reverse=True)
    itl = [predictor.predict(Allocation(5, num)).itl_p95_s for num in range(1, 6)]
    assert itl == sorted(itl, reverse=True)


def test_the_cheapest_allocation_is_the_cheapest_of_all(service: ServiceModel) -> None:
    predictor = Predictor(service, forecast(10.0), CONFIG)
    found = cheapest_within_targets(predictor, CONFIG)
    splits = [Allocation(p, g) for p in range(1, 8) for g in range(1, 9 - p)]
    assert found is not None
    assert found.allocation.total == min(each.total for each in splits if predictor.predict(each).meets(CONFIG))
    assert cheapest_within_targets(Predictor(service, forecast(200.0), CONFIG), CONFIG) is None


def test_the_best_division_in_an_overload_follows_the_traffic(service: ServiceModel) -> None:
    heavy = most_good(Predictor(service, forecast(40.0), CONFIG), CONFIG).allocation
    light = most_good(Predictor(service, forecast(80.0, 200, 512), CONFIG), CONFIG).allocation
    assert heavy.num_prefill >= 6
    assert light.num_generate >= 6


def test_more_groups_are_started_before_a_target_is_missed(service: ServiceModel) -> None:
    autoscaler = watched(service, CONFIG, 15.0, PROMPT_HEAVY, 60.0)
    decision = autoscaler.decide(60.0, FleetState(Allocation(2, 1), NO_WORK))
    assert decision.after.num_prefill >= 4
    assert {each.move for each in decision.actions} <= {Move.START_PREFILL, Move.START_GENERATE}
    assert decision.present is not None and not decision.present.meets(CONFIG)
    assert "2:1 -> " in decision.text and "ttft_p95" in decision.text and "start prefill" in decision.text


def test_a_role_is_flipped_where_that_is_sooner(service: ServiceModel) -> None:
    autoscaler = watched(service, CONFIG, 30.0, OUTPUT_HEAVY, 60.0)
    decision = autoscaler.decide(60.0, FleetState(Allocation(7, 1), NO_WORK, drain_prefill_s=1.0))
    (flip,) = decision.actions
    assert flip.move is Move.FLIP_TO_GENERATE and flip.takes_s == 3.0
    assert decision.after.total == 8


def test_a_new_group_starts_where_a_flip_would_take_longer(service: ServiceModel) -> None:
    roomy = AutoscalingConfig(ttft_p95_s=2.0, itl_p95_s=0.02, min=2, max=30, cooldown_s=20.0)
    autoscaler = watched(service, roomy, 30.0, OUTPUT_HEAVY, 60.0)
    decision = autoscaler.decide(60.0, FleetState(Allocation(7, 1), NO_WORK, drain_prefill_s=100.0))
    assert not {each.move for each in decision.actions} & {Move.FLIP_TO_GENERATE, Move.FLIP_TO_PREFILL}


def test_groups_leave_only_after_a_cool_down(service: ServiceModel) -> None:
    autoscaler = watched(service, CONFIG, 4.0, PROMPT_HEAVY, 70.0)
    state = FleetState(Allocation(4, 4), NO_WORK)
    first = autoscaler.decide(70.0, state)
    assert not first.actions and "is enough" in first.reason
    see(autoscaler, 4.0, PROMPT_HEAVY, 70.0, 89.0)
    assert not autoscaler.decide(89.0, state).actions
    last = autoscaler.decide(90.0, state)
    assert last.after.total < 8
    assert {each.move for each in last.actions} <= {Move.DRAIN_PREFILL, Move.DRAIN_GENERATE, Move.FLIP_TO_PREFILL}


def test_work_that_waits_counts_as_load(service: ServiceModel) -> None:
    idle = Predictor(service, forecast(5.0), CONFIG).predict(Allocation(2, 1))
    queued = Predictor(service, forecast(5.0), CONFIG, Backlog(30.0, 100, 30.0)).predict(Allocation(2, 1))
    assert queued.prefill_load == pytest.approx(idle.prefill_load + 0.5)
    assert queued.generation_load > idle.generation_load
    assert queued.good_share < idle.good_share


def test_a_small_gain_is_awaited(service: ServiceModel) -> None:
    autoscaler = watched(service, CONFIG, 21.8, PROMPT_HEAVY, 60.0)
    state = FleetState(Allocation(5, 3), NO_WORK)
    assert "not yet" in autoscaler.decide(60.0, state).reason
    see(autoscaler, 21.8, PROMPT_HEAVY, 60.0, 60.0 + PATIENCE_S)
    assert autoscaler.decide(60.0 + PATIENCE_S, state).after == Allocation(6, 2)


def test_all_groups_leave_without_traffic_and_come_back_with_it(service: ServiceModel) -> None:
    config = AutoscalingConfig(min=0, max=8, cooldown_s=20.0)
    autoscaler = watched(service, config, 2.0, PROMPT_HEAVY, 10.0)
    state = FleetState(Allocation(1, 1), NO_WORK)
    assert autoscaler.decide(200.0, state).after == Allocation(0, 0)
    autoscaler.window.arrived(200.5, 6000)
    back = autoscaler.decide(201.0, FleetState(Allocation(0, 0), Backlog(0.2, 1, 30.0)))
    assert back.after.num_prefill and back.after.num_generate
    assert back.reason == "traffic has come"


@pytest.mark.parametrize(("field", "value"), [("max", 1), ("min", 1), ("min", 9), ("ttft_p95_s", 0.0)])
def test_bad_settings_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        dataclasses.replace(CONFIG, **{field: value})


def test_prompts_that_are_mostly_cached_ask_for_less_prefill(service: ServiceModel) -> None:
    seen = forecast(5.0).classes[0]
    cached = TrafficForecast((dataclasses.replace(seen, cached_share=0.75),))
    whole, rest = (Predictor(service, each, CONFIG).predict(Allocation(4, 4)) for each in (forecast(5.0), cached))
    assert rest.prefill_load < 0.3 * whole.prefill_load
    assert rest.itl_p95_s == whole.itl_p95_s


def test_chains_that_lend_half_of_their_ranks_bear_half_as_much_and_cost_no_further_group(chains: ServiceModel) -> None:
    predictor = Predictor(chains, forecast(5.0), CONFIG)
    lending, whole = predictor.predict(Allocation(2, 6, 2)), predictor.predict(Allocation(2, 6))
    assert lending.prefill_load == pytest.approx(2 * whole.prefill_load)
    assert lending.ttft_p95_s > 1.5 * whole.ttft_p95_s
    assert lending.allocation.total == Allocation(2, 4).total
    assert str(lending.allocation) == "2:6 (2 lent)"


def test_a_rank_is_lent_only_where_that_is_sooner_than_a_new_group_or_the_budget_is_full(chains: ServiceModel) -> None:
    busy = FleetState(Allocation(2, 1), lends_ranks=True, drain_prefill_s=60.0)
    for state, move in (
        (dataclasses.replace(busy, drain_prefill_s=0.5), Move.LEND_RANK),
        (busy, Move.START_GENERATE),
        (dataclasses.replace(busy, lends_ranks=False, drain_prefill_s=0.5), Move.START_GENERATE),
    ):
        autoscaler = watched(chains, CONFIG, 12.0, OUTPUT_HEAVY, 20.0)
        decided = [autoscaler.decide(20.0 + second, state) for second in range(int(PATIENCE_S) + 2)]
        assert move in {action.move for decision in decided for action in decision.actions}, move
