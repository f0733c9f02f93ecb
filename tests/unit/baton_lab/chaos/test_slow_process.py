"""A child process uses no more than its share, goes on afterwards, and may end meanwhile."""

import asyncio
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from baton_lab.chaos.slow_process import slow_down
from deploy.groups.spawner import WorkerHandle
from tests.support.clusters.processes.named_thread import SPINS, child
from tests.support.eventually import eventually
from tests.support.manual_clock import ManualClock

pytestmark = [pytest.mark.integration, pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")]
SHARE = 0.2


@dataclass
class Spinning:
    """A worker that computes all the time, as far as slow_down knows it."""

    process: subprocess.Popen[str]

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def used_s(self) -> float:
        return time.clock_gettime(~self.pid << 3 | 2)

    def state(self) -> str:
        """In the kernel's letters: R runs, T is stopped."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]

    async def until_stopped(self) -> float:
        """Return what it has used by then."""

        async def state() -> str:
            return self.state()

        await eventually(state, lambda now: now == "T")
        return self.used_s()

    async def until_used(self, used_s: float) -> None:
        async def now_used_s() -> float:
            return self.used_s()

        await eventually(now_used_s, lambda now_s: now_s >= used_s)


async def test_process_is_stopped_until_it_has_earned_time_and_goes_on_in_the_end() -> None:
    clock = ManualClock(100.0)
    with child(SPINS) as process:
        worker = Spinning(process)
        slowing = asyncio.create_task(slow_down(cast(WorkerHandle, worker), SHARE, 10.0, clock))
        for _ in range(3):
            used_s = await worker.until_stopped()
            clock.advance(1.0)
            await worker.until_used(used_s + SHARE * 0.1)
        used_s = await worker.until_stopped()
        clock.advance(10.0)
        assert await slowing > 0.0
        await worker.until_used(used_s + 0.2)
        assert worker.state() == "R"


async def test_it_is_over_when_the_process_ends() -> None:
    with child(SPINS) as process:
        worker = Spinning(process)
        slowing = asyncio.create_task(slow_down(cast(WorkerHandle, worker), SHARE, 1.0, ManualClock(100.0)))
        await worker.until_stopped()
        process.kill()
        await asyncio.wait_for(slowing, 60.0)
