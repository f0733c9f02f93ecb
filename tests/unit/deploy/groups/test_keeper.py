"""The keeper of an orchestrator, over servers in this process: what its incarnations share, and what ends them."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import ConfigError, UnavailableError
from baton.planning.planner import ChainPlanner
from baton.process.clock import SystemClock
from baton.results.completion import ModelInfo
from deploy.groups.keeper import OrchestratorKeeper, OrchestratorPlan
from deploy.groups.surroundings import Heartbeat, Surroundings
from orchestrator.api.host import OrchestratorHost
from orchestrator.membership.view import ClusterView, GenerationGroup, Orders
from tests.support.clusters.clients import HOST
from tests.support.clusters.planners import linear_planner
from tests.support.clusters.workers import InProcessSpawner, InProcessWorker, orchestrator_worker
from tests.support.models.tiny_tokenizer import write_letters

pytestmark = pytest.mark.integration

MODEL = ModelInfo("letters", 64, 100, "float32", False, "layout")
VIEW = ClusterView(generation=(GenerationGroup("g", f"{HOST}:1", "layout", num_slots=4, max_slot_tokens=64),))
DRAINED = Orders(drained=frozenset({"g"}))
WITHIN_S = 60.0


class Scene:
    """A keeper's surroundings, and what it was asked for."""

    def __init__(self, folder: Path) -> None:
        self.spawner = InProcessSpawner()
        self.num_planners = 0
        self.damage: Exception | None = None
        """Raised instead of making a planner."""
        self.reports: list[str] = []
        heartbeat = Heartbeat(0.05, 20.0)
        self.around = Surroundings(self.spawner, heartbeat, SystemClock(), self.reports.append)
        self.heard = asyncio.Event()
        """Set at each heartbeat that was answered."""
        self.plan = OrchestratorPlan(orchestrator_worker(folder), MODEL, (), self._make_planner, HOST)

    @property
    def incarnations(self) -> list[InProcessWorker]:
        """All incarnations of the orchestrator, in order."""
        return self.spawner.made

    @property
    def host(self) -> OrchestratorHost:
        """The present incarnation's server."""
        server = self.incarnations[-1].server
        assert isinstance(server, OrchestratorHost)
        return server

    def keeper(self, view: Callable[[], ClusterView] = lambda: VIEW) -> OrchestratorKeeper:
        """One that was not started yet."""
        keeper = OrchestratorKeeper(self.plan, view, self.around)
        keeper.follow = self._follow
        return keeper

    async def until_heard(self) -> None:
        """The orchestrator has answered once more."""
        self.heard.clear()
        await asyncio.wait_for(self.heard.wait(), WITHIN_S)

    async def until_replaced(self) -> None:
        """The present incarnation is killed, and another one serves."""
        self.incarnations[-1].kill()
        await self.incarnations[-1].wait()
        await self.until_heard()

    def _make_planner(self) -> ChainPlanner:
        self.num_planners += 1
        if self.damage is not None:
            raise self.damage
        return linear_planner()

    def _follow(self, orders: Orders) -> Orders:
        self.heard.set()
        return orders


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    write_letters(tmp_path)
    return Scene(tmp_path)


@asynccontextmanager
async def started(keeper: OrchestratorKeeper) -> AsyncIterator[OrchestratorKeeper]:
    await keeper.start()
    try:
        yield keeper
    finally:
        await keeper.close()


async def test_a_new_life_has_the_ports_the_orders_and_the_planner_of_the_former(scene: Scene) -> None:
    scene.plan = replace(scene.plan, ports=(0, 0))
    async with started(scene.keeper()) as keeper:
        ports = keeper.ports
        assert 0 not in ports
        scene.host._members.drain("g")
        while keeper.orders != DRAINED:
            await scene.until_heard()
        await scene.until_replaced()
        assert keeper.ports == ports and keeper.orders == DRAINED
        assert scene.host._members.orders == DRAINED and scene.host._members.is_kept("g")
        assert scene.host._members.present == VIEW
        assert scene.num_planners == 1
    assert len(scene.incarnations) == 2 and all(incarnation.ended for incarnation in scene.incarnations)


async def test_a_changed_view_is_pushed_at_once(scene: Scene) -> None:
    views = [ClusterView()]
    async with started(scene.keeper(lambda: views[-1])) as keeper:
        assert scene.host._members.present == ClusterView()
        views.append(VIEW)
        keeper.tell()
        await scene.until_heard()
        assert scene.host._members.present == VIEW


async def test_an_orchestrator_that_serves_already_is_taken_over_as_it_is(scene: Scene) -> None:
    async with started(scene.keeper()) as former:
        incarnation = scene.incarnations[-1]
        scene.spawner.found = incarnation
        async with started(scene.keeper()) as keeper:
            assert keeper.ports == former.ports
            assert scene.incarnations == [incarnation] and scene.num_planners == 1


async def test_a_process_that_was_started_before_is_the_first_life_and_ends_with_a_failure(scene: Scene) -> None:
    process = await scene.spawner.start(scene.plan.worker)
    keeper = scene.keeper()
    await keeper.start(process)
    assert scene.incarnations == [process] and keeper.pid == process.pid
    await keeper.close()
    assert process.ended
    another = await scene.spawner.start(scene.plan.worker)
    scene.damage = ConfigError("the model has no weights: choose another")
    with pytest.raises(ConfigError, match="has no weights"):
        await scene.keeper().start(another)
    assert scene.incarnations == [process, another] and another.ended


async def test_what_keeps_the_first_life_from_serving_is_said_and_nothing_is_left(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.damage = ConfigError("the model has no weights: choose another")
    with pytest.raises(ConfigError, match="^the model has no weights: choose another$"):
        await scene.keeper().start()
    scene.damage = None
    with closing(socket.create_server((HOST, 0))) as taken:
        port = taken.getsockname()[1]
        scene.plan = replace(scene.plan, ports=(port, None))
        with pytest.raises(ConfigError, match=f"^cannot listen on {HOST}:{port}: "):
            await scene.keeper().start()

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(OrchestratorHost, "Update", never)
    scene.plan = replace(scene.plan, start_timeout_s=0.1)
    with pytest.raises(UnavailableError, match=r"the orchestrator did not start within 0\.1 s"):
        await scene.keeper().start()
    assert len(scene.incarnations) == 3 and all(incarnation.ended for incarnation in scene.incarnations)


async def test_nothing_is_left_of_a_cancelled_start(scene: Scene) -> None:
    asked = asyncio.Event()

    def view() -> ClusterView:
        asked.set()
        return VIEW

    starting = asyncio.create_task(scene.keeper(view).start())
    await asyncio.wait_for(asked.wait(), WITHIN_S)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    assert starting.cancelled()
    assert len(scene.incarnations) == 1 and scene.incarnations[0].ended


async def test_a_life_that_cannot_begin_is_tried_again(scene: Scene) -> None:
    async with started(scene.keeper()):
        scene.spawner.failures = [UnavailableError("no room"), OSError("no memory")]
        await scene.until_replaced()
    assert len(scene.incarnations) == 2
    assert any("no memory" in line for line in scene.reports)


async def test_a_keeper_that_was_closed_is_closed_again_at_will(scene: Scene) -> None:
    keeper = scene.keeper()
    await keeper.close()
    await keeper.start()
    assert not scene.incarnations[-1].ended
    await keeper.close()
    await keeper.close()
    assert keeper.pid == 0 and scene.reports == []


async def test_each_life_has_a_higher_term(scene: Scene) -> None:
    async with started(scene.keeper()):
        first = term_of_host(scene.host)
        await scene.until_replaced()
        assert term_of_host(scene.host) == first + 1 == 2


async def test_an_orchestrator_that_workers_refuse_is_replaced_by_one_that_they_accept(scene: Scene) -> None:
    async with started(scene.keeper()):
        scene.around.terms.hear(8)
        refused = scene.host
        assert refused._server is not None
        refused._server.orchestrator.poller.is_superseded = True
        while scene.host is refused or scene.host._server is None:
            await scene.until_heard()
        assert term_of_host(scene.host) == 9
    assert scene.incarnations[0].ended


def term_of_host(host: OrchestratorHost) -> int:
    """The term that the orchestrator sends to workers."""
    assert host._server is not None
    term: int = host._server.orchestrator.clients._make_channel.keywords["term"]
    return term
