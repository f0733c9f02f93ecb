"""Supervision survives unexpected failures: an exception of a port is logged and reported, and supervision
continues."""

import asyncio
import errno
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from ray.exceptions import RaySystemError

from baton.errors import BatonError, InvalidArgumentError, UnavailableError
from baton.process.backoff import Backoff
from baton.process.clock import SystemClock
from baton.results.completion import ModelInfo
from baton.transport.status_interceptor import translate_rpc_errors
from baton.types import MAX_EPOCH
from baton.v1 import prefill_pb2
from baton.v1.prefill_pb2 import PrefillStatus
from baton_lab.chaos.network import NetworkedSpawner, NetworkedWorker
from deploy.groups.chain_links import ChainLinks
from deploy.groups.group import WorkerGroup
from deploy.groups.keeper import OrchestratorKeeper, OrchestratorPlan
from deploy.groups.processes import ProcessSpawner
from deploy.groups.surroundings import Heartbeat, Surroundings
from orchestrator.membership.view import ClusterView
from tests.support.clusters.clients import HOST
from tests.support.clusters.failing_spawner import CALLS, FailingSpawner, FailingWorker, Failures, RandomFailures
from tests.support.clusters.fault_plans import PickedPlan
from tests.support.clusters.planners import linear_planner
from tests.support.clusters.workers import InProcessSpawner, orchestrator_worker, tiny_worker
from tests.support.eventually import eventually

pytestmark = pytest.mark.integration

ERRORS = (
    OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
    RaySystemError("the GCS does not answer"),  # type: ignore[no-untyped-call]
    RuntimeError("nobody expected this"),
)
READY_S = 60.0


class Scene:
    """One group over workers whose ports fail as `failures` says."""

    def __init__(self, failures: Failures, *, is_chain: bool = False, dead_after_s: float = 60.0) -> None:
        self.spawner = InProcessSpawner()
        self.failures = failures
        self.reports: list[str] = []
        around = Surroundings(
            FailingSpawner(NetworkedSpawner(self.spawner, PickedPlan({}, 0.0)), failures),
            Heartbeat(0.05, dead_after_s),
            SystemClock(),
            self.reports.append,
            backoff=Backoff(first_s=0.1, most_s=0.2),
        )
        ranks = [tiny_worker("prefill", rank) for rank in range(2)]
        engine = [tiny_worker("generate")]
        links = ChainLinks(HOST, 60.0) if is_chain else None
        self.group = WorkerGroup("a-group", ranks if is_chain else engine, around, links)

    async def kill_unseen(self, rank: int = 0) -> NetworkedWorker:
        """Ends a worker behind the supervisor's back, as the operating system may."""
        worker = self.worker(rank)
        await worker.close()
        self.group.suspect()
        return worker

    def worker(self, rank: int = 0) -> NetworkedWorker:
        handle = self.group.workers[rank].handle
        assert isinstance(handle, FailingWorker) and isinstance(handle.inner, NetworkedWorker)
        return handle.inner

    async def until_replaced(self, former: NetworkedWorker, rank: int = 0) -> None:
        """Returns when the group is ready with another worker in that place."""

        async def read() -> tuple[bool, bool]:
            return self.group.ready, self.worker(rank) is not former

        await eventually(read, all, within_s=READY_S)


@asynccontextmanager
async def running(scene: Scene) -> AsyncIterator[Scene]:
    await scene.group.start()
    try:
        yield scene
    finally:
        scene.failures.due.clear()
        await scene.group.close()
    assert all(worker.ended for worker in scene.spawner.made)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("call", CALLS)
async def test_a_group_is_ready_again_after_any_failure_of_any_call(
    call: str, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(Scene(Failures(), dead_after_s=3.0 if call == "kill" else 60.0)) as scene:
        former = scene.worker()
        scene.failures.due[call] = error
        if call == "kill":
            former.stop()  # no call is answered any more, and the process lives
        else:
            await scene.kill_unseen()
        await scene.until_replaced(former)
        assert scene.failures.num_raised == 1
    told = [record for record in caplog.records if record.exc_info is not None and record.exc_info[1] is error]
    assert told and all(record.levelno >= logging.WARNING for record in told)
    assert any(str(error) in line for line in scene.reports)


async def test_a_worker_that_cannot_be_waited_for_is_replaced_all_the_same() -> None:
    """The wait that begins with the worker's incarnation fails, so nothing wakes the supervisor but its heartbeat."""
    failures = Failures()
    failures.due["wait"] = OSError(errno.ECHILD, "no child processes")
    async with running(Scene(failures)) as scene:
        former = await scene.kill_unseen()
        await scene.until_replaced(former)
    assert any("no child processes" in line for line in scene.reports)


@pytest.mark.parametrize("seed", range(4))
async def test_a_chain_outlives_failures_at_random(seed: int) -> None:
    failures = RandomFailures(seed, ERRORS, probability=0.5, num_left=0)
    async with running(Scene(failures, is_chain=True)) as scene:
        for rank in (0, 1, 0):
            failures.num_left = 3
            former = await scene.kill_unseen(rank)
            await scene.until_replaced(former, rank)
        failures.num_left = 0


async def test_a_supervision_that_ends_all_the_same_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async with running(Scene(Failures())) as scene:
        [supervising] = [task for task in asyncio.all_tasks() if "WorkerGroup._supervise" in repr(task.get_coro())]
        supervising.cancel()  # by somebody who has no business there
        await asyncio.wait({supervising}, timeout=60)
        assert scene.reports[-1].startswith("the supervision of a-group has ended for good: restart the cluster")
        num_reports = len(scene.reports)
    assert len(scene.reports) == num_reports  # the group's own end is no failure
    assert "the supervision of a-group has ended" in caplog.text


@asynccontextmanager
async def kept(
    folder: Path, view: Callable[[], ClusterView], dead_after_s: float = 60.0
) -> AsyncIterator[OrchestratorKeeper]:
    """An orchestrator in a process of its own."""
    model = ModelInfo("smollm2-135m", 512, 49152, "bfloat16", True, "layout")
    plan = OrchestratorPlan(orchestrator_worker(folder), model, (), linear_planner, HOST)
    around = Surroundings(ProcessSpawner(300.0), Heartbeat(0.1, dead_after_s), SystemClock(), lambda line: None)
    keeper = OrchestratorKeeper(plan, view, around)
    try:
        await keeper.start()
        yield keeper
    finally:
        await keeper.close()


async def test_the_keeper_of_an_orchestrator_outlives_failures(smollm2: Path, caplog: pytest.LogCaptureFixture) -> None:
    failures: list[Exception] = []
    told = asyncio.Event()

    def view() -> ClusterView:
        if failures:
            raise failures.pop(0)
        told.set()
        return ClusterView()

    async with kept(smollm2, view) as keeper:
        failures += ERRORS
        told.clear()
        await asyncio.wait_for(told.wait(), READY_S)
        assert not failures and all(str(error) in caplog.text for error in ERRORS)
        former = keeper.pid
        failures.append(ERRORS[0])
        os.kill(former, signal.SIGKILL)
        await until_another(keeper, former)


@pytest.mark.ci
async def test_an_orchestrator_that_is_stopped_is_killed_and_replaced(smollm2: Path) -> None:
    async with kept(smollm2, ClusterView, dead_after_s=6.0) as keeper:
        former, ports = keeper.pid, keeper.ports
        os.kill(former, signal.SIGSTOP)
        await until_another(keeper, former)
        assert keeper.ports == ports
        with pytest.raises(ProcessLookupError):
            os.kill(former, 0)


async def until_another(keeper: OrchestratorKeeper, former: int) -> None:
    """Returns when another process than the former one serves."""

    async def pid() -> int:
        return keeper.pid

    await eventually(pid, lambda now: now not in (0, former), within_s=60)


async def hijack(scene: Scene, epoch: int, num_ranks: int = 1) -> None:
    """Somebody who reaches a rank's port moves it alone to that epoch; of more ranks than one, no other comes."""
    timeout_s = 60.0 if num_ranks == 1 else 0.2
    request = prefill_pb2.StartEpochRequest(
        epoch=epoch, rank=0, num_ranks=num_ranks, store="127.0.0.1:1", timeout_s=timeout_s
    )
    with translate_rpc_errors():
        await scene.group.workers[0].prefill.StartEpoch(request, timeout=60)


async def until_linked(scene: Scene, after: int) -> None:
    """Returns when all ranks are in the group's own epoch, which is a later one, with whole links."""

    async def read() -> tuple[bool, list[tuple[int, str]]]:
        statuses = [await worker.status(60.0) for worker in scene.group.workers.values() if not worker.handle.ended]
        return scene.group.ready, [
            (each.epoch, each.epoch_error) for each in statuses if isinstance(each, PrefillStatus)
        ]

    links = scene.group.links
    assert links is not None
    await eventually(
        read, lambda seen: seen == (True, [(links.epoch, "")] * 2) and links.epoch > after, within_s=READY_S
    )


async def test_an_absurd_epoch_is_refused() -> None:
    async with running(Scene(Failures(), is_chain=True)) as scene:
        for epoch in (2**48, 2**64 - 1):
            with pytest.raises(InvalidArgumentError, match=f"epoch = {epoch} is out of range: use at most {MAX_EPOCH}"):
                await hijack(scene, epoch)
        assert scene.group.ready and scene.group.links is not None and scene.group.links.epoch == 1


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_a_rank_that_somebody_else_moved_on_is_linked_again(num_ranks: int) -> None:
    async with running(Scene(Failures(), is_chain=True)) as scene:
        former = scene.worker()
        if num_ranks == 1:
            await hijack(scene, 2**40)
        else:
            with pytest.raises(BatonError):
                await hijack(scene, 2**40, num_ranks)
        await until_linked(scene, after=2**40)
        assert scene.worker() is former


async def test_a_rank_that_was_moved_to_the_last_epoch_is_replaced() -> None:
    async with running(Scene(Failures(), is_chain=True)) as scene:
        former = scene.worker()
        await hijack(scene, MAX_EPOCH)
        await scene.until_replaced(former)
        await until_linked(scene, after=1)
        assert scene.group.links is not None and scene.group.links.epoch < 100


async def test_a_new_supervisor_does_not_go_on_from_the_last_epoch() -> None:
    links = ChainLinks(HOST, 60.0)
    with pytest.raises(UnavailableError, match=f"a rank is in epoch {MAX_EPOCH}, and {MAX_EPOCH} is the last"):
        links.skip_to(MAX_EPOCH)
    assert links.epoch == 0
