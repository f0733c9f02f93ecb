"""Workers of a cluster that ended recently, and the requests that they were computing when they crashed.

Filled by the groups, which watch the workers' processes; read by the cluster's view. Bounded in number and in time.
"""

from baton.limits import CRASHES_KEPT_S, MAX_ENDED_WORKERS
from baton.process.crash_notes import Crash
from orchestrator.membership.view import EndedWorker


class EndedWorkers:
    """Bounded list of the workers that ended recently. Used on the supervisor's loop."""

    def __init__(self) -> None:
        self._ends: dict[tuple[str, int], tuple[EndedWorker, float]] = {}
        """Ended workers, each with the time of its end, by endpoint and process id. The latest is the last one."""

    def add(self, endpoint: str, pid: int, crash: Crash | None, now_s: float) -> None:
        """Add a worker that has ended, with its last endpoint and its process id. A worker that moved between two
        groups may be reported by both; then the first report counts. `crash`: description of the crash; None if the
        worker did not crash."""
        worker = EndedWorker(endpoint, () if crash is None else crash.computing)
        self._ends.setdefault((endpoint, pid), (worker, now_s))
        if len(self._ends) > MAX_ENDED_WORKERS:
            del self._ends[next(iter(self._ends))]

    def recent(self, now_s: float) -> tuple[EndedWorker, ...]:
        """Return the ended workers that are still in the list at the time `now_s`. The latest is the last one."""
        return tuple(worker for worker, at_s in self._ends.values() if now_s - at_s < CRASHES_KEPT_S)
