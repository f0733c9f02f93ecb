"""One prefill group in the simulator: ranks that work through the parts of jobs, each on the job that is due first.

The order, the preemption by a job that is due earlier, and the predicted work of each part are those of the production
book (`orchestrator.membership.prefill_book`). A job is done when its last rank is; ranks that wait for each other make
it later than its longest part by what the planner predicts for idle ranks. Preemption is between layers in the engine,
and at any instant here. Pure.
"""

import heapq
import math

from baton.ids import Rank
from orchestrator.placement.chain_width import ChainPlan


class _RankQueue:
    """The parts of jobs that one rank has before it."""

    def __init__(self) -> None:
        self.parts: list[tuple[float, int]] = []
        """(due, job) of the parts that are not done."""
        self.left_s: dict[int, float] = {}
        self.at_s = 0.0
        """Instant for which `left_s` of the first part holds."""

    def catch_up(self, now_s: float) -> None:
        if self.parts:
            head = self.parts[0][1]
            self.left_s[head] = max(self.left_s[head] - (now_s - self.at_s), 0.0)
        self.at_s = now_s

    @property
    def end_s(self) -> float:
        return self.at_s + self.left_s[self.parts[0][1]] if self.parts else math.inf


class ChainQueue:
    """The jobs of one prefill group's ranks. Its owner calls `advance` at the instants that `next_end_s` names."""

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
            queue = self._ranks[rank]
            queue.catch_up(now_s)
            queue.left_s[number] = left_s
            heapq.heappush(queue.parts, (plan.job.due_s, number))

    def advance(self, now_s: float) -> tuple[list[tuple[int, Rank]], list[tuple[int, float]]]:
        """End the parts that are done by now. Return them as (job, rank), and the jobs that have no part left, each
        with the instant of its first token."""
        parts, jobs = [], []
        for rank, queue in enumerate(self._ranks):
            while queue.end_s <= now_s + 1e-12:
                end_s = queue.end_s
                _, number = heapq.heappop(queue.parts)
                del queue.left_s[number]
                queue.at_s = end_s
                parts.append((number, Rank(rank)))
                self._open[number] -= 1
                if not self._open[number]:
                    del self._open[number]
                    jobs.append((number, end_s + self._lag_s.pop(number)))
        return parts, jobs

    @property
    def next_end_s(self) -> float:
        """Return the instant at which the next part of a job ends; infinite without jobs."""
        return min(queue.end_s for queue in self._ranks)
