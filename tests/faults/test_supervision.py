"""Supervision outlives what it did not foresee: an exception of a port is logged and reported, and the work goes on."""

import asyncio
import errno
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from ray.exceptions import RaySystemError

from baton.clock import SystemClock
from deploy.chain_links import ChainLinks
from deploy.chaos_network import NetworkedSpawner, NetworkedWorker
from deploy.groups import Heartbeat, Surroundings, WorkerGroup
from deploy.restarts import Backoff
from tests.support.eventually import eventually
from tests.support.failing_spawner import CALLS, FailingSpawner, FailingWorker, Failures, RandomFailures
from tests.support.fault_plans import PickedPlan
from tests.support.spawners import HOST, InProcessSpawner, tiny_worker

ERRORS = (
    OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
    RaySystemError("the GCS does not answer"),
    RuntimeError("nobody expected this"),
)
READY_S = 10.0


class Scene:
    """One group over workers whose ports fail as `failures` says."""

    def __init__(self, failures: Failures, *, is_chain: bool = False) -> None:
        self.spawner = InProcessSpawner()
        self.failures = failures
        self.reports: list[str] = []
        around = Surroundings(
            FailingSpawner(NetworkedSpawner(self.spawner, PickedPlan({}, 0.0)), failures),
            Heartbeat(0.05, 0.5),
            SystemClock(),
            self.reports.append,
            backoff=Backoff(first_s=0.1, most_s=0.2),
        )
        ranks = [tiny_worker("prefill", rank) for rank in range(2)]
        engine = [tiny_worker("generate")]
        links = ChainLinks(HOST, 10.0) if is_chain else None
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
    async with running(Scene(Failures())) as scene:
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
    """The wait that begins with the worker's life fails, so nothing wakes the supervisor but its heartbeat."""
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
        await asyncio.wait({supervising}, timeout=5)
        assert scene.reports[-1].startswith("the supervision of a-group has ended, which it must not")
        num_reports = len(scene.reports)
    assert len(scene.reports) == num_reports  # the group's own end is no failure
    assert "the supervision of a-group has ended" in caplog.text
