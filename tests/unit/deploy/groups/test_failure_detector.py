"""What a supervisor knows of processes that leave its heartbeats unanswered."""

import pytest

from deploy.groups.failure_detector import FailureDetector
from deploy.groups.heartbeats import send_heartbeats
from deploy.groups.surroundings import Heartbeat, Surroundings
from deploy.groups.worker import Worker
from tests.support.clusters.workers import InProcessSpawner, tiny_worker
from tests.support.manual_clock import ManualClock

pytestmark = pytest.mark.integration


def test_silence_begins_with_the_first_unanswered_heartbeat_since_the_last_answer() -> None:
    failure_detector = FailureDetector()
    assert not failure_detector.has_begun
    assert [failure_detector.go_on(50.0, 51.0, 1.0), failure_detector.go_on(52.0, 53.5, 1.0)] == [1.0, 3.5]
    assert failure_detector.has_begun
    failure_detector.end()
    assert not failure_detector.has_begun
    assert failure_detector.go_on(90.0, 90.5, 1.0) == 0.5


class StoppedClock(ManualClock):
    """The clock of a process that is stopped for 100 s between any two looks."""

    def now_s(self) -> float:
        self.advance(100.0)
        return super().now_s()


async def test_a_supervisor_that_was_stopped_itself_has_not_heard_silence() -> None:
    spawner = InProcessSpawner()
    handle = await spawner.start(tiny_worker("generate"))
    worker = Worker(handle)
    around = Surroundings(spawner, Heartbeat(0.1, dead_after_s=0.5), StoppedClock(), print)
    await handle.server.stop()
    ended = []
    for _ in range(2):
        await send_heartbeats([worker], None, around)
        ended.append(handle.ended)
    await worker.close()
    assert ended == [False, True]
