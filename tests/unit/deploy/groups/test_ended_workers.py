"""Workers that have ended are remembered once each, for a time, and the latest only."""

from baton.limits import CRASHES_KEPT_S, MAX_ENDED_WORKERS
from baton.process.crash_notes import Crash
from deploy.groups.ended_workers import EndedWorkers
from orchestrator.membership.view import EndedWorker

CRASH = Crash("Fatal Python error: Aborted", ("00", "01"))


def test_a_crashed_worker_is_remembered_with_what_it_computed_and_a_killed_one_without() -> None:
    ended = EndedWorkers()
    ended.add("h:1", 11, CRASH, 0.0)
    ended.add("h:2", 12, None, 1.0)
    assert ended.recent(2.0) == (EndedWorker("h:1", ("00", "01")), EndedWorker("h:2"))


def test_a_process_counts_once_and_another_at_its_endpoint_counts_as_well() -> None:
    ended = EndedWorkers()
    for pid in (11, 11, 12):
        ended.add("h:1", pid, CRASH, 0.0)
    ended.add("h:1", 11, None, 0.0)
    assert ended.recent(0.0) == (EndedWorker("h:1", ("00", "01")),) * 2


def test_old_ones_and_all_but_the_latest_are_forgotten() -> None:
    ended = EndedWorkers()
    for number in range(MAX_ENDED_WORKERS + 2):
        ended.add(f"h:{number}", 1, None, float(number))
    assert [worker.endpoint for worker in ended.recent(0.0)] == [
        f"h:{number}" for number in range(2, MAX_ENDED_WORKERS + 2)
    ]
    assert [worker.endpoint for worker in ended.recent(CRASHES_KEPT_S + MAX_ENDED_WORKERS)] == [
        f"h:{MAX_ENDED_WORKERS + 1}"
    ]
