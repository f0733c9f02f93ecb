"""Simulated prefill groups: their jobs, and the times at which the jobs finish.

The order of jobs and their predicted work are those of the orchestrator's queues
(`orchestrator.membership.prefill_queues`). A job with an earlier due time preempts another job between two layers, as
in the engine. This module simulates groups of one rank, whose work is computed by formulas.
`baton_lab.traffic.work.chain_turns` simulates groups of several ranks. Does no I/O.
"""

import heapq
import math
from dataclasses import dataclass
from typing import Protocol

from baton.types import Rank
from orchestrator.placement.chain_width import ChainPlan

NOTHING_S = 1e-12
"""Seconds below which a time difference is treated as zero, because sums have rounding errors."""

Done = tuple[list[tuple[int, Rank]], list[tuple[int, float]]]
"""Finished work, as two lists. The first has (job, rank) for each rank that finished its chunk of a job. The second has
(job, time of its first token) for each finished job."""


class PrefillWork(Protocol):
    """Interface of the simulated jobs of one prefill group. The owner must call `advance` at the simulated time
    `next_turn_s`."""

    def __len__(self) -> int: ...

    def add(self, number: int, plan: ChainPlan, now_s: float) -> None:
        """Add a job with the number `number`, whose ranks and durations are those of `plan`."""

    def advance(self, now_s: float) -> Done:
        """Advance the simulated time to `now_s`. Return the work that finished after the previous call of `advance`."""

    @property
    def next_turn_s(self) -> float:
        """Return the next time at which a rank finishes its chunk of a job or switches to another job. Infinity if
        there are no jobs."""


@dataclass
class _Part:
    """Remaining work of one job on a rank."""

    left_s: float
    layer_s: float
    """Duration of one layer in seconds. The job can be preempted between two layers."""
    lag_s: float
    """Seconds from the end of the rank's work on the job to the job's first token."""


class RankQueue:
    """Simulated jobs of a prefill group of one rank. Implements PrefillWork."""

    def __init__(self) -> None:
        self._parts: dict[int, _Part] = {}
        """Remaining work of each unfinished job, by job number."""
        self._waiting: list[tuple[float, int]] = []
        """Heap of (due time, job number) for the jobs that are waiting."""
        self._running: tuple[float, int] | None = None
        self._at_s = 0.0
        """Simulated time up to which the running job's work has been subtracted from its `left_s`."""

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, number: int, plan: ChainPlan, now_s: float) -> None:
        self._catch_up(now_s)
        (left_s,) = plan.job.left_s.values()
        self._parts[number] = _Part(left_s, plan.layer_s, max(plan.ttft_s - left_s, 0.0))
        heapq.heappush(self._waiting, (plan.job.due_s, number))
        if self._running is None:
            self._running = heapq.heappop(self._waiting)

    def advance(self, now_s: float) -> Done:
        parts, jobs = [], []
        while self._running is not None and (end_s := self.next_turn_s) <= now_s + NOTHING_S:
            self._catch_up(end_s)
            due_s, number = self._running
            if self._parts[number].left_s <= NOTHING_S:
                parts.append((number, Rank(0)))
                jobs.append((number, end_s + self._parts.pop(number).lag_s))
            else:
                heapq.heappush(self._waiting, (due_s, number))
            self._running = heapq.heappop(self._waiting) if self._waiting else None
        return parts, jobs

    @property
    def next_turn_s(self) -> float:
        if self._running is None:
            return math.inf
        part = self._parts[self._running[1]]
        gives_way = self._waiting and self._waiting[0] < self._running
        return self._at_s + (math.fmod(part.left_s, part.layer_s) if gives_way and part.layer_s else part.left_s)

    def _catch_up(self, now_s: float) -> None:
        if self._running is not None:
            part = self._parts[self._running[1]]
            part.left_s = max(part.left_s - (now_s - self._at_s), 0.0)
        self._at_s = now_s
