"""The workers of a cluster that have ended lately, and which requests they were computing when they crashed.

Filled by the groups, which watch the workers' processes; read by the cluster's view. Bounded in number and in time.
"""

from baton.limits import CRASHES_KEPT_S, MAX_ENDED_WORKERS
from baton.process.crash_notes import Crash
from orchestrator.membership.view import EndedWorker


class EndedWorkers:
    """Remembers workers that have ended. Used on the supervisor's loop."""

    def __init__(self) -> None:
        self._ends: dict[tuple[str, int], tuple[EndedWorker, float]] = {}
        """Workers, and when they ended, by endpoint and process id, the latest last."""

    def add(self, endpoint: str, pid: int, crash: Crash | None, now_s: float) -> None:
        """Remember a worker, by its last endpoint and its process id. If two groups report the end of one that changed
        from one to the other, the first report counts. `crash`: how it crashed; None if it did not."""
        worker = EndedWorker(endpoint, () if crash is None else crash.computing)
        self._ends.setdefault((endpoint, pid), (worker, now_s))
        if len(self._ends) > MAX_ENDED_WORKERS:
            del self._ends[next(iter(self._ends))]

    def recent(self, now_s: float) -> tuple[EndedWorker, ...]:
        """Return the workers that are still remembered at that time, the latest last."""
        return tuple(worker for worker, at_s in self._ends.values() if now_s - at_s < CRASHES_KEPT_S)
