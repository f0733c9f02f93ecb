"""List of the workers of a cluster that ended recently, with the requests that they were computing when they crashed.

Groups watch the workers' processes and add entries to the list. `Cluster.view` copies the list into the state that the
orchestrator receives. The list is limited in length, and entries expire.
"""

from baton.limits import CRASHES_KEPT_S, MAX_ENDED_WORKERS
from baton.process.crash_notes import Crash
from orchestrator.membership.view import EndedWorker


class EndedWorkers:
    """List of workers that ended recently, limited in length and in time. Used on the supervisor's asyncio loop."""

    def __init__(self) -> None:
        self._ends: dict[tuple[str, int], tuple[EndedWorker, float]] = {}
        """Ended workers by (endpoint, process id), oldest first. Each value is the worker and the time in seconds at
        which it ended."""

    def add(self, endpoint: str, pid: int, crash: Crash | None, now_s: float) -> None:
        """Add a worker that has ended, with its last endpoint and its process id. `crash` describes the crash; None:
        the worker did not crash. If the worker was moved between two groups, both may add it; the second call has no
        effect."""
        worker = EndedWorker(endpoint, () if crash is None else crash.computing)
        self._ends.setdefault((endpoint, pid), (worker, now_s))
        if len(self._ends) > MAX_ENDED_WORKERS:
            del self._ends[next(iter(self._ends))]

    def recent(self, now_s: float) -> tuple[EndedWorker, ...]:
        """Return the workers that ended recently and whose entries have not expired at the time `now_s`, oldest
        first."""
        return tuple(worker for worker, at_s in self._ends.values() if now_s - at_s < CRASHES_KEPT_S)
