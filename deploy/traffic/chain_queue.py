"""One prefill group in the simulator: ranks that work through the parts of jobs, each on the job that is due first.

The order and the predicted work of each part are those of the production book
(`orchestrator.membership.prefill_book`). A job that is due earlier preempts another between two layers, as in the
engine. A job is done when its last rank is; ranks that wait for each other make it later than its longest part by what
the planner predicts for idle ranks. Pure.
"""

import heapq
import math
from dataclasses import dataclass

from baton.ids import Rank
from orchestrator.placement.chain_width import ChainPlan

_NOTHING_S = 1e-12
"""Seconds that count as none: sums of times differ by their rounding."""


@dataclass
class _Part:
    """One rank's part of a job."""

    left_s: float
    layer_s: float
    """Seconds of a layer, between two of which another part may come first."""


class _RankQueue:
    """The parts of jobs that one rank has before it."""

    def __init__(self) -> None:
        self._parts: dict[int, _Part] = {}
        """Parts that are not done, by job."""
        self._waiting: list[tuple[float, int]] = []
        """(due, job) of the parts that do not run, as a heap."""
        self._running: tuple[float, int] | None = None
        self._at_s = 0.0
        """Instant for which the running part's `left_s` holds."""

    def add(self, due_s: float, number: int, part: _Part, now_s: float) -> None:
        self._catch_up(now_s)
        self._parts[number] = part
        heapq.heappush(self._waiting, (due_s, number))
        if self._running is None:
            self._running = heapq.heappop(self._waiting)

    @property
    def turn_end_s(self) -> float:
        """Instant at which the running part is done, or a part that is due earlier takes its place."""
        if self._running is None:
            return math.inf
        part = self._parts[self._running[1]]
        gives_way = self._waiting and self._waiting[0] < self._running
        return self._at_s + (math.fmod(part.left_s, part.layer_s) if gives_way and part.layer_s else part.left_s)

    def end_turn(self) -> int | None:
        """Go on to the end of the turn; return the job whose part is done then, None if the part gives way."""
        assert self._running is not None
        due_s, number = self._running
        self._catch_up(self.turn_end_s)
        is_done = self._parts[number].left_s <= _NOTHING_S
        if is_done:
            del self._parts[number]
        else:
            heapq.heappush(self._waiting, (due_s, number))
        self._running = heapq.heappop(self._waiting) if self._waiting else None
        return number if is_done else None

    def _catch_up(self, now_s: float) -> None:
        if self._running is not None:
            part = self._parts[self._running[1]]
            part.left_s = max(part.left_s - (now_s - self._at_s), 0.0)
        self._at_s = now_s


class ChainQueue:
    """The jobs of one prefill group's ranks. Its owner calls `advance` at the instants that `next_turn_s` names."""

    def __init__(self, num_ranks: int) -> None:
        self._ranks = [_RankQueue() for _ in range(num_ranks)]
        self._open: dict[int, int] = {}
        """Number of parts that are not done, by job."""
        self._lag_s: dict[int, float] = {}
        """Seconds from the end of a job's last part to its first token, by job."""

    def __len__(self) -> int:
        return len(self._open)

    def add(self, number: int, plan: ChainPlan, now_s: float) -> None:
        """Add a job: its parts to the queues of its ranks."""
        self._open[number] = len(plan.job.left_s)
        self._lag_s[number] = max(plan.ttft_s - max(plan.job.left_s.values()), 0.0)
        for rank, left_s in plan.job.left_s.items():
            self._ranks[rank].add(plan.job.due_s, number, _Part(left_s, plan.layer_s), now_s)

    def advance(self, now_s: float) -> tuple[list[tuple[int, Rank]], list[tuple[int, float]]]:
        """End the parts that are done by now. Return them as (job, rank), and the jobs that have no part left, each
        with the instant of its first token."""
        parts, jobs = [], []
        for rank, queue in enumerate(self._ranks):
            while (end_s := queue.turn_end_s) <= now_s + _NOTHING_S:
                number = queue.end_turn()
                if number is None:
                    continue
                parts.append((number, Rank(rank)))
                self._open[number] -= 1
                if not self._open[number]:
                    del self._open[number]
                    jobs.append((number, end_s + self._lag_s.pop(number)))
        return parts, jobs

    @property
    def next_turn_s(self) -> float:
        """Return the instant at which a rank next ends a part of a job or goes on with another; infinite without
        jobs."""
        return min(queue.turn_end_s for queue in self._ranks)
