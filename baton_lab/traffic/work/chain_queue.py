"""Prefill groups in the simulator: their jobs, and the times at which jobs finish.

The order and the predicted work of jobs are those of the production queues (`orchestrator.membership.prefill_queues`).
A job that is due earlier preempts another between two layers, as in the engine. This module has groups of one rank,
whose work is computed in closed form; groups of several ranks are in `baton_lab.traffic.work.chain_turns`. Pure.
"""

import heapq
import math
from dataclasses import dataclass
from typing import Protocol

from baton.types import Rank
from orchestrator.placement.chain_width import ChainPlan

NOTHING_S = 1e-12
"""Seconds below which a time is treated as zero, because of rounding errors in sums."""

Done = tuple[list[tuple[int, Rank]], list[tuple[int, float]]]
"""Finished work: (job, rank) for each rank that finished its chunk of a job, and (job, time of its first token) for
each finished job."""


class PrefillWork(Protocol):
    """Jobs of one prefill group. Its owner calls `advance` at the time `next_turn_s`."""

    def __len__(self) -> int: ...

    def add(self, number: int, plan: ChainPlan, now_s: float) -> None:
        """Add a job to the queue."""

    def advance(self, now_s: float) -> Done:
        """Advance to `now_s`, and return the work finished by then."""

    @property
    def next_turn_s(self) -> float:
        """Return the next time at which a rank finishes its chunk of a job or switches to another job; infinite without
        jobs."""


@dataclass
class _Part:
    """Remaining work of a job on a rank."""

    left_s: float
    layer_s: float
    """Seconds per layer. The job can be preempted between two layers."""
    lag_s: float
    """Seconds from the end of the rank's work to the first token."""


class RankQueue:
    """Jobs of a group of one rank. Implements PrefillWork."""

    def __init__(self) -> None:
        self._parts: dict[int, _Part] = {}
        """Unfinished jobs, by number."""
        self._waiting: list[tuple[float, int]] = []
        """Heap of (due time, number) of the jobs that are not running."""
        self._running: tuple[float, int] | None = None
        self._at_s = 0.0
        """Time for which the running job's `left_s` is valid."""

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
