"""A running cluster scales itself: real workers that a real roster starts and ends, by what the cost model says of the
traffic that really comes."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from baton.calls.cluster_state import ClusterState, cluster_state_from_proto
from baton.sampling_params import SamplingParams
from orchestrator.membership.view import Orders
from orchestrator.requests.config import AutoscalingConfig, OrchestratorConfig
from tests.support.clusters.planners import deciding_planner
from tests.support.clusters.supervision import SupervisedCluster, supervised
from tests.support.engines.generation import prompt, reference_ids
from tests.support.eventually import eventually

pytestmark = pytest.mark.integration

PARAMS = SamplingParams(max_tokens=8, seed=4, ignore_eos=True)
LONG = SamplingParams(max_tokens=40, seed=4, ignore_eos=True)
SHORT = SamplingParams(max_tokens=2, seed=4, ignore_eos=True)
BUSY_S = 0.05
"""Between two requests: with chains that are supposed to take 160 ms for one, three at least."""


def config(**settings: Any) -> OrchestratorConfig:
    """Decides ten times a second, and lets groups leave soon."""
    given: dict[str, Any] = {
        "ttft_p95_s": 1.0,
        "itl_p95_s": 0.1,
        "max": 8,
        "cooldown_s": 1.0,
        "interval_s": 0.1,
        "cold_start_s": 0.5,
    }
    return OrchestratorConfig(
        max_queued_requests=100_000,
        max_queued_tokens=10**9,
        disaggregation="always",
        autoscaling=AutoscalingConfig(**{"mode": "act"} | given | settings),
    )


@dataclass
class Scaled:
    """A supervised cluster that scales itself, and its clients."""

    cluster: SupervisedCluster
    num_asked: int = 0
    answers: list[asyncio.Task[None]] = field(default_factory=list)
    expected: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """Answers by the lengths of prompt and output, which tell all that is asked apart."""

    async def ask(self, num_tokens: int = 16, params: SamplingParams = PARAMS) -> None:
        """One stream to its end, equal to the reference."""
        token_ids = prompt(num_tokens)
        answer = await self.cluster.ask(self.cluster.request(token_ids, params), timeout_s=200)
        asked = num_tokens, params.max_tokens
        if asked not in self.expected:
            self.expected[asked] = reference_ids(self.cluster.decoder, token_ids, params)
        assert answer.token_ids == self.expected[asked]

    @asynccontextmanager
    async def asked(self, gap_s: float, num_tokens: int = 16, params: SamplingParams = PARAMS) -> AsyncIterator[None]:
        """Requests at this pace, whatever becomes of those before, all of which are answered in the end."""

        async def keep_asking() -> None:
            while True:
                self.answers.append(asyncio.create_task(self.ask(num_tokens, params)))
                await asyncio.sleep(gap_s)

        asking = asyncio.create_task(keep_asking())
        try:
            yield
        finally:
            asking.cancel()
            await asyncio.gather(*self.answers)

    async def num_answered(self) -> int:
        return sum(answer.done() for answer in self.answers)

    async def state(self) -> ClusterState:
        return cluster_state_from_proto(await self.cluster.state())

    def has_forgotten_others(self, state: ClusterState) -> bool:
        """Whether one group of each role is left, and no group that stood in for others is known after it has left. The
        one that is left may have stood in itself: a chain that has lent a rank stays before one that has not."""
        names = {group.name for group in state.groups}
        return len(names) == 2 and self.cluster.members.orders.stand_ins <= names

    async def sizes(self) -> tuple[int, int]:
        """Prefill and generation groups that get work."""
        roles = [group.role for group in (await self.state()).groups if group.is_ready]
        return roles.count("prefill"), roles.count("generate")


@asynccontextmanager
async def scaled(num_ranks: int = 2, slower: float = 20, **settings: Any) -> AsyncIterator[Scaled]:
    planner = deciding_planner(max_ranks=num_ranks, slower=slower)
    made = SupervisedCluster(num_ranks=num_ranks)
    made.room.num_places = 32
    async with supervised(made, config=config(**settings), planner=planner):
        yield Scaled(made)


async def test_groups_come_with_the_traffic_and_leave_after_it_and_no_request_is_lost() -> None:
    async with scaled() as made:
        async with made.asked(BUSY_S):
            await eventually(made.sizes, lambda sizes: sizes[0] >= 3)
            await eventually(made.num_answered, lambda num_answered: num_answered > 10)
        await eventually(made.sizes, lambda sizes: sizes == (1, 1))
        await eventually(made.state, made.has_forgotten_others)


async def test_groups_that_left_come_back_under_their_names() -> None:
    async with scaled() as made:
        await eventually(made.sizes, lambda sizes: sizes == (1, 1))  # one generation group too many
        left = await eventually(made.state, lambda state: len(state.groups) == 2)
        (away,) = left.groups_away
        assert away in ("generate-0", "generate-1")
        assert not left.why_degraded and not left.why_not_serving
        async with made.asked(0.01):
            await eventually(lambda: ready_names(made), lambda names: away in names)


async def ready_names(made: Scaled) -> set[str]:
    return {group.name for group in (await made.state()).groups if group.is_ready}


def would_meet_the_target(state: ClusterState) -> bool:
    """Whether more chains are advised, with which first tokens are in time."""
    scaling = state.scaling
    if scaling is None or scaling.num_prefill < 2:
        return False
    return scaling.forecast_rate > 5 and 0 < scaling.ttft_p95_s < 1.0


async def test_decisions_are_explained_and_only_explained_in_advisory_mode(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "orchestrator.actuation")
    async with scaled(mode="advise", max=32) as made:  # a budget that is enough for any rate of this traffic
        async with made.asked(BUSY_S):
            state = await eventually(made.state, would_meet_the_target)
        assert made.cluster.members.orders == Orders()
        scaling = state.scaling
        assert scaling is not None and scaling.mode == "advise"
        assert all(change.explanation.startswith("1:2 -> ") for change in scaling.changes)
        assert "start prefill x" in scaling.explanation and "forecast " in scaling.explanation
        would = [record.getMessage() for record in caplog.records if "would scale" in record.getMessage()]
        assert any("start prefill x" in line for line in would)


async def test_all_groups_sleep_without_traffic_and_the_next_request_wakes_them() -> None:
    async with scaled(min=0) as made:
        await eventually(made.sizes, lambda sizes: sizes == (0, 0))
        state = await eventually(made.state, lambda state: not state.groups)
        assert not state.why_not_serving
        await asyncio.gather(*(made.ask() for _ in range(5)))
        assert (await made.sizes())[1] >= 1


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_a_full_budget_is_divided_anew_by_workers_that_change_their_role(num_ranks: int) -> None:
    budget = {"min": 3, "max": 3}
    async with scaled(num_ranks, 4 / num_ranks, **budget, flip_s=0.2, cooldown_s=0.5) as made:
        async with made.asked(0.1, 48, SHORT):
            for_prompts = (1, 2) if num_ranks == 2 else (2, 1)
            await eventually(made.sizes, lambda sizes: sizes == for_prompts)
        async with made.asked(0.15, 8, LONG):
            for_answers = (1, 3) if num_ranks == 2 else (1, 2)
            await eventually(made.sizes, lambda sizes: sizes == for_answers)
        async with made.asked(0.04 if num_ranks == 2 else 0.1, 48, SHORT):
            await eventually(made.sizes, lambda sizes: sizes == for_prompts)
        there, back = ("lend a rank", "return a rank") if num_ranks == 2 else ("to generate x1", "to prefill x1")
        changes = explained(await made.state())
        assert any(there in each for each in changes) and any(back in each for each in changes)


def explained(state: ClusterState) -> list[str]:
    assert state.scaling is not None
    return [change.explanation for change in state.scaling.changes]


async def test_an_operators_drain_is_not_taken_back() -> None:
    async with scaled() as made:
        made.cluster.members.drain("generate-1")
        async with made.asked(0.01):
            names = await eventually(lambda: ready_names(made), lambda names: "generate-2" in names)
        assert "generate-1" not in names


async def test_starts_without_room_are_put_off() -> None:
    async with scaled() as made:
        made.cluster.room.num_places = len(made.cluster.room.taken) + 1
        async with made.asked(BUSY_S):
            await eventually(made.state, wants_prefill)
            await eventually(made.state, lambda state: not made.cluster.members.orders.stand_ins)
            assert (await made.sizes())[0] == 1


def wants_prefill(state: ClusterState) -> bool:
    return state.scaling is not None and "start prefill" in state.scaling.explanation


async def test_a_drain_that_an_earlier_orchestrator_ordered_goes_on() -> None:
    async with supervised(orchestrator=False) as cluster:
        cluster.members.let_go("generate-1")
        planner = deciding_planner(max_ranks=2, slower=20)
        async with cluster.serving(config(cooldown_s=1000.0), planner):

            async def is_present() -> bool:
                return cluster.members.is_present("generate-1")

            await eventually(is_present, lambda present: not present)
