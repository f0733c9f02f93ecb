"""The keeper of the orchestrator's actor on a real Ray instance. After an unexpected failure, it continues and still
replaces the orchestrator."""

import asyncio
import errno
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.planning.planner import ChainPlanner
from baton.process.clock import SystemClock
from baton.results.completion import ModelInfo
from baton.transport.terms import NO_TERM
from deploy.groups.keeper import OrchestratorKeeper, OrchestratorPlan
from deploy.groups.surroundings import Heartbeat, Surroundings
from deploy.groups.terms import Terms
from deploy.ray_cluster.memory import RayTermStore
from deploy.ray_cluster.spawner import RaySpawner, end_worker
from orchestrator.membership.view import ClusterView, Orders
from tests.support.clusters.clients import HOST
from tests.support.clusters.on_ray.ray_heads import NAMESPACE
from tests.support.clusters.planners import linear_planner
from tests.support.clusters.workers import orchestrator_worker

MODEL = ModelInfo("smollm2-135m", 512, 49152, "bfloat16", True, "layout")


pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("joined")]


class Scene:
    """A keeper whose supervisor fails, as listed."""

    def __init__(self, folder: Path) -> None:
        self.failures: list[Exception] = []
        """Of looks at the view, then of what follows an answer."""
        self.later_failures: list[Exception] = []
        self.reports: list[str] = []
        self.followed = asyncio.Event()
        """Set at each answer that was followed."""
        self.num_planners = 0
        plan = OrchestratorPlan(orchestrator_worker(folder), MODEL, (), self._make_planner, HOST)
        spawner, terms = RaySpawner(NAMESPACE, 60.0, {}), Terms(RayTermStore(NAMESPACE))
        around = Surroundings(spawner, Heartbeat(0.5, 10.0), SystemClock(), self.reports.append, terms=terms)
        self.keeper = OrchestratorKeeper(plan, self._view, around)
        self.keeper.follow = self._follow

    def _make_planner(self) -> ChainPlanner:
        self.num_planners += 1
        return linear_planner()

    def _view(self) -> ClusterView:
        if self.failures:
            raise self.failures.pop(0)
        return ClusterView()

    def _follow(self, orders: Orders) -> Orders:
        if self.later_failures:
            raise self.later_failures.pop(0)
        self.followed.set()
        return orders

    async def until_followed(self) -> None:
        """The orchestrator has answered once more, and was heard."""
        self.followed.clear()
        await asyncio.wait_for(self.followed.wait(), 60)

    async def until_replaced(self, former: int) -> None:
        """Another process than the former one has answered."""
        while self.keeper.pid in (0, former):
            await self.until_followed()


@asynccontextmanager
async def kept(folder: Path) -> AsyncIterator[Scene]:
    scene = Scene(folder)
    await scene.keeper.start()
    try:
        await scene.until_followed()
        yield scene
    finally:
        await scene.keeper.close()


async def test_the_keeper_outlives_failures_and_replaces_its_actor_after_them(letters: Path) -> None:
    async with kept(letters) as scene:
        scene.failures = [OSError(errno.EMFILE, "Too many open files"), RuntimeError("the GCS does not answer")]
        scene.later_failures = [ValueError("orders that nobody understands")]
        await scene.until_followed()
        assert not scene.failures and not scene.later_failures
        for text in ("Too many open files", "the GCS does not answer", "orders that nobody understands"):
            assert any(text in line for line in scene.reports)
        former = scene.keeper.pid
        scene.failures = [MemoryError("while it is replaced")]
        os.kill(former, signal.SIGKILL)
        await scene.until_replaced(former)


@pytest.mark.ci
async def test_an_actor_that_is_stopped_is_killed_and_replaced_on_its_port(letters: Path) -> None:
    async with kept(letters) as scene:
        former, ports = scene.keeper.pid, scene.keeper.ports
        os.kill(former, signal.SIGSTOP)
        await scene.until_replaced(former)
        assert scene.keeper.ports == ports


@pytest.mark.ci
async def test_an_actor_that_an_earlier_keeper_left_is_taken_over_or_ended(letters: Path) -> None:
    async with kept(letters) as left:
        async with kept(letters) as found:
            assert (found.keeper.pid, found.keeper.ports) == (left.keeper.pid, left.keeper.ports)
            assert (left.num_planners, found.num_planners) == (1, 0)
            former = left.keeper.pid
        await left.until_replaced(former)  # the second keeper ended it
    async with kept(letters) as left:
        former = left.keeper.pid
        await end_worker(NAMESPACE, orchestrator_worker(letters).name)
        await left.until_replaced(former)
    await end_worker(NAMESPACE, orchestrator_worker(letters).name)  # harmless when there is none


def test_a_term_is_claimed_once() -> None:
    first, second = RayTermStore(NAMESPACE), RayTermStore(NAMESPACE)
    before = first.highest()
    claimed = [Terms(store).claim() for store in (first, second, first)]
    assert claimed == [before + 1, before + 2, before + 3]
    assert not second.create(claimed[-1]) and second.highest() == claimed[-1]
    assert RayTermStore("another-cluster").highest() == NO_TERM
