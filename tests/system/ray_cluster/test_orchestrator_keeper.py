"""The keeper of the orchestrator's actor, over a real Ray: it goes on after what nobody foresaw, and still replaces."""

import asyncio
import errno
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.clock import SystemClock
from baton.results import ModelInfo
from deploy.config.environment import prepare_ray_environment
from deploy.config.file import load_config
from deploy.groups.group import Heartbeat
from orchestrator.membership.members import ClusterView, Orders
from tests.support.clusters.ray_heads import ray_head

MODEL = ModelInfo("smollm2-135m", 512, 49152, "bfloat16", True, "layout")


@pytest.fixture(scope="module")
def joined_ray() -> Iterator[None]:
    prepare_ray_environment()
    import ray

    with ray_head({}) as head:
        ray.init(head.address, namespace="kept", configure_logging=False, log_to_driver=False)
        yield
        ray.shutdown()


class Scene:
    """A keeper whose supervisor fails, as listed."""

    def __init__(self, folder: Path) -> None:
        from deploy.ray_cluster.orchestrator import OrchestratorKeeper, OrchestratorPlan

        config = load_config(None, ["name=kept", "orchestrator.port=0", "orchestrator.metrics_port=-1"])
        self.failures: list[Exception] = []
        """Of looks at the view, then of what follows an answer."""
        self.later_failures: list[Exception] = []
        self.reports: list[str] = []
        self.followed = asyncio.Event()
        """Set at each answer that was followed."""
        plan = OrchestratorPlan(config, folder, MODEL, ())
        self.keeper = OrchestratorKeeper(
            plan, self._view, Heartbeat(0.1, 2.0), SystemClock(), report=self.reports.append
        )
        self.keeper.follow = self._follow

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


@asynccontextmanager
async def kept(folder: Path) -> AsyncIterator[Scene]:
    scene = Scene(folder)
    await scene.keeper.start()
    keeping = asyncio.create_task(scene.keeper.keep())
    try:
        await scene.until_followed()
        yield scene
        assert not keeping.done()
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await scene.keeper.close()


async def test_the_keeper_outlives_failures_and_replaces_its_actor_after_them(joined_ray: None, smollm2: Path) -> None:
    async with kept(smollm2) as scene:
        scene.failures = [OSError(errno.EMFILE, "Too many open files"), RuntimeError("the GCS does not answer")]
        scene.later_failures = [ValueError("orders that nobody understands")]
        await scene.until_followed()
        assert not scene.failures and not scene.later_failures
        for text in ("Too many open files", "the GCS does not answer", "orders that nobody understands"):
            assert any(text in line for line in scene.reports)
        former = scene.keeper._pid
        scene.failures = [MemoryError("while it is replaced")]
        os.kill(former, signal.SIGKILL)
        await scene.until_followed()
        assert scene.keeper._pid != former
