"""Scaling in the simulator: groups start, drain and flip as ordered, no request is lost, and the autoscaler pays."""

import dataclasses
import itertools

import numpy as np
import pytest

from baton.errors import InvalidArgumentError
from baton_lab.traffic.comparing import Setting
from baton_lab.traffic.events import Timeline
from baton_lab.traffic.fleet import Role, State
from baton_lab.traffic.policies import between, carry_out, target_of
from baton_lab.traffic.results import Results, ScalerEvent
from baton_lab.traffic.service import GroupSizes
from baton_lab.traffic.simulation import Simulation
from baton_lab.traffic.traces.generators import OUTPUT_HEAVY, PROMPT_HEAVY, Phase, shifting, steady
from baton_lab.traffic.traces.trace import Trace
from orchestrator.autoscaling.prediction import Allocation
from orchestrator.requests.config import AutoscalingConfig
from tests.support.clusters.planners import traffic_planner


@pytest.fixture(scope="module")
def on() -> Setting:
    config = AutoscalingConfig(ttft_p95_s=6.0, itl_p95_s=0.04, min=2, max=4, cooldown_s=30.0)
    return Setting(traffic_planner("a100-eager"), GroupSizes(1, 16, 10.0, 1.0), config, (2, 2))


class _Orders:
    """A scaler that carries out given orders, one an interval."""

    interval_s = 5.0

    def __init__(self, *orders: tuple[int, int]) -> None:
        self._orders = list(orders)
        self.seen: list[str] = []

    def arrived(self, now_s: float, num_prompt_tokens: int) -> None: ...

    def ended(self, now_s: float, num_prompt_tokens: int, num_output_tokens: int) -> None: ...

    def scale(self, simulation: Simulation) -> list[ScalerEvent]:
        fleet = simulation.fleet
        self.seen.append(f"{len(fleet.of(Role.PREFILL, State.READY))}:{len(fleet.of(Role.GENERATE, State.READY))}")
        if not self._orders:
            return []
        carry_out(fleet, between(target_of(fleet), Allocation(*self._orders.pop(0))))
        return []


def ordered(on: Setting, trace: Trace, *orders: tuple[int, int]) -> tuple[Results, _Orders]:
    scaler = _Orders(*orders)
    return on.replay(trace, (2, 2), scaler), scaler


def assert_nothing_is_lost(results: Results) -> None:
    assert not np.isnan(results.end_s).any()
    assert (results.end_s >= results.first_s).all() and (results.first_s > results.trace.arrivals_s).all()


def test_a_new_group_serves_after_its_cold_start(on: Setting) -> None:
    results, scaler = ordered(on, steady(2.0, 40.0, 1), (3, 2))
    assert scaler.seen[:4] == ["2:2", "2:2", "3:2", "3:2"]
    assert results.group_s == pytest.approx(5 * results.makespan_s - 5)


def test_a_flipped_group_serves_in_its_other_role_once_it_is_idle(on: Setting) -> None:
    results, scaler = ordered(on, steady(0.5, 40.0, 1), (1, 3), (2, 2))
    assert scaler.seen[1:3] == ["1:3", "2:2"] or "1:3" in scaler.seen
    assert scaler.seen[-1] == "2:2"
    assert_nothing_is_lost(results)
    assert results.group_s == pytest.approx(4 * results.makespan_s)


def test_drains_lose_nothing_and_cost_nothing_afterwards(on: Setting) -> None:
    results, scaler = ordered(on, steady(1.0, 60.0, 1), (1, 1))
    assert scaler.seen[-1] == "1:1"
    assert_nothing_is_lost(results)
    assert results.group_s < 3.2 * results.makespan_s


def test_many_changes_under_load_lose_nothing(on: Setting) -> None:
    orders = [*itertools.islice(itertools.cycle([(3, 1), (1, 3), (2, 1), (1, 1), (2, 2)]), 40)]
    results, _ = ordered(on, steady(3.0, 200.0, 2), *orders)
    assert_nothing_is_lost(results)


def test_requests_wait_where_all_groups_have_left(on: Setting) -> None:
    trace = Trace("late", np.array([0.0, 60.0]), np.array([100, 100]), np.array([5, 5]))
    idle = dataclasses.replace(on, config=dataclasses.replace(on.config, min=0, cooldown_s=10.0), start=(1, 1))
    _, results = idle.run(trace, "autoscale")
    assert results.ttft_s[1] == pytest.approx(on.sizes.cold_start_s, abs=2.0)
    assert results.group_s < 0.7 * 2 * results.makespan_s


def test_advice_changes_nothing(on: Setting) -> None:
    trace = shifting([Phase(40.0, 3.0, PROMPT_HEAVY), Phase(40.0, 6.0, OUTPUT_HEAVY)], 1)
    advised = dataclasses.replace(on, config=dataclasses.replace(on.config, mode="advise"))
    _, results = advised.run(trace, "autoscale")
    assert results.scaler_events
    assert np.array_equal(results.end_s, on.replay(trace, on.start).end_s)


@pytest.mark.ci
def test_the_autoscaler_follows_a_shift_that_no_fixed_division_bears(on: Setting) -> None:
    rates = {kind: 0.85 * on.predicted_rate(kind) for kind in (PROMPT_HEAVY, OUTPUT_HEAVY)}
    trace = shifting([Phase(100.0, rate, kind) for kind, rate in rates.items()], 1)
    shares = {name: on.run(trace, name)[1].is_good(on.targets).mean() for name in ("autoscale", "load", "best-static")}
    assert shares["autoscale"] >= 1.3 * shares["best-static"]
    assert shares["autoscale"] >= 1.15 * shares["load"]


def test_targets_of_the_gate_are_kept_in_time() -> None:
    timeline, seen = Timeline(), []
    timeline.at(2.0, lambda: seen.append(timeline.now_s()))
    timeline.at(1.0, lambda: timeline.at(0.5, lambda: seen.append(timeline.unix_ns())))
    timeline.run()
    assert seen == [1_000_000_000, 2.0]


def test_unknown_policies_are_refused(on: Setting) -> None:
    with pytest.raises(InvalidArgumentError, match="magic"):
        on.run(steady(1.0, 5.0, 1), "magic")
