"""Prefill groups in the simulator: the jobs that they have before them, and when these are done.

The order and the predicted work of each job are those of the production book
(`orchestrator.membership.prefill_queues`). A job that is due earlier preempts another between two layers, as in the
engine. Here is a group of one rank, whose work is advanced in closed form; groups of several ranks are in
`baton_lab.traffic.work.chain_turns`. Pure.
"""

import heapq
import math
from dataclasses import dataclass
from typing import Protocol

from baton.types import Rank
from orchestrator.placement.chain_width import ChainPlan

NOTHING_S = 1e-12
"""Seconds treated as zero, because sums of times differ by rounding."""

Done = tuple[list[tuple[int, Rank]], list[tuple[int, float]]]
"""Finished parts of jobs, as (job, rank), and finished jobs, each with the instant of its first token."""


class PrefillWork(Protocol):
    """The jobs of one prefill group. Its owner calls `advance` at the instants that `next_turn_s` names."""

    def __len__(self) -> int: ...

    def add(self, number: int, plan: ChainPlan, now_s: float) -> None:
        """Add a job to those that wait."""

    def advance(self, now_s: float) -> Done:
        """Advance to `now_s`, and return what is done by then."""

    @property
    def next_turn_s(self) -> float:
        """Return the instant at which a rank next ends a part of a job or resumes another; infinite without jobs."""


@dataclass
class _Part:
    """Remaining work of a job on a rank."""

    left_s: float
    layer_s: float
    """Seconds of a layer, between two of which another job may come first."""
    lag_s: float
    """Seconds from the end of the rank's work to the first token."""


class RankQueue:
    """The jobs of a group of one rank. Implements PrefillWork."""

    def __init__(self) -> None:
        self._parts: dict[int, _Part] = {}
        """Jobs that are not done, by number."""
        self._waiting: list[tuple[float, int]] = []
        """(due, number) of the jobs that do not run, as a heap."""
        self._running: tuple[float, int] | None = None
        self._at_s = 0.0
        """Instant for which the running job's `left_s` holds."""

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
