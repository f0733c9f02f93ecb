"""What a supervisor remembers of a worker's heartbeats."""

from deploy.groups.worker import Worker
from tests.support.clusters.spawners import InProcessSpawner, tiny_worker


async def test_silence_begins_with_the_first_unanswered_heartbeat_since_the_last_answer() -> None:
    worker = Worker(await InProcessSpawner().start(tiny_worker("generate")))
    try:
        assert not worker.is_silent
        assert [worker.unanswered(50.0), worker.unanswered(51.0)] == [50.0, 50.0]
        assert worker.is_silent
        worker.answered()
        assert not worker.is_silent
        assert worker.unanswered(90.0) == 90.0
    finally:
        await worker.close()
