"""Simulated prefill group of several ranks. Its ranks alternate between jobs, as in `prefill_workers`.

A rank divides its work on a job into turns. A turn has two halves. The first half completes a layer, for which it needs
the KV of the earlier ranks. The second half begins the next layer: the rank computes the projections, sends its own KV,
and computes the attention to its own tokens.

Each rank gives its next turn to the ready job with the earliest due time. While a job waits for KV of earlier ranks,
another job runs for one turn. A short prompt can therefore wait several times for a turn of a long prompt, each time
for about the duration of one layer.
Does no I/O.
"""

import math
from bisect import insort
from dataclasses import dataclass, field, replace

import numpy as np

from baton.planning.chain.wavefront import LayerTimes, chain_ttft, work_of
from baton.planning.cost_model import BATON, CostModel
from baton.types import Rank
from baton_lab.traffic.work.chain_queue import NOTHING_S, Done
from orchestrator.placement.chain_width import ChainPlan


@dataclass(frozen=True)
class _Turn:
    """Unit of a rank's work on a job. A turn completes one layer and begins the next one. There are two exceptions: a
    rank's first turn on a job completes no layer, and the last turn of the chain's last rank begins no layer."""

    until_projected_s: float | None
    """Seconds from the start of the turn until the rank's own KV of the next layer is computed. None if no layer begins
    in this turn."""
    seconds: float


@dataclass
class _Part:
    """Work of one rank on one job."""

    due_s: float
    number: int
    turns: list[_Turn]
    hop_s: float
    """Seconds to transfer the KV of one layer from the previous rank of the chain."""
    num_taken: int = 0
    is_first: bool = True
    """True if the rank is the first of the job's chain."""
    behind: "_Part | None" = None
    """Work of the next rank of the chain on the same job; None on the last rank."""
    projected_s: list[float] = field(default_factory=list)
    """Times at which the rank has computed its own KV, one for each layer so far."""
    arrived_s: list[float] = field(default_factory=list)
    """Times at which the KV of all earlier ranks arrives at this rank, one for each layer so far. Empty on the first
    rank."""

    @property
    def order(self) -> tuple[float, int]:
        return self.due_s, self.number

    @property
    def ready_s(self) -> float:
        """Earliest time at which the rank can begin its next turn (unit of work, about one layer) on the job. Minus
        infinity: immediately. Infinity: not known yet, because KV of earlier ranks is missing."""
        if self.is_first or not self.num_taken:
            return -math.inf
        return self.arrived_s[self.num_taken - 1] if self.num_taken <= len(self.arrived_s) else math.inf

    def project(self, at_s: float) -> None:
        """Record that the rank's own KV of the next layer is computed at the time `at_s`, and update the arrival times
        at the later ranks."""
        self.projected_s.append(at_s)
        self.pass_on()

    def pass_on(self) -> None:
        """Compute when the KV of each complete layer arrives at the next rank of the chain, and repeat this for all
        later ranks. A layer is complete when the rank has its own KV and that of all earlier ranks."""
        behind = self.behind
        if behind is None:
            return
        known = len(self.projected_s) if self.is_first else min(len(self.projected_s), len(self.arrived_s))
        for layer in range(len(behind.arrived_s), known):
            complete_s = max(self.projected_s[layer], -math.inf if self.is_first else self.arrived_s[layer])
            behind.arrived_s.append(complete_s + behind.hop_s)
        behind.pass_on()


class _Rank:
    """One rank of the group. It has a list of its unfinished jobs, ordered by due time, and runs one turn (about one
    layer) of one job at a time."""

    def __init__(self) -> None:
        self.parts: list[_Part] = []
        self.running: _Part | None = None
        self._turn_end_s = math.inf

    @property
    def next_s(self) -> float:
        """Time at which the current turn ends. If the rank is idle: the time at which the first of its jobs becomes
        ready. Infinity if this time is not known yet, or if the idle rank has no jobs."""
        return self._turn_end_s if self.running else min((part.ready_s for part in self.parts), default=math.inf)

    def begin_turn(self, now_s: float) -> None:
        """Start a turn on the ready job with the earliest due time. If no job is ready, the rank stays idle."""
        part = next((each for each in self.parts if each.ready_s <= now_s + NOTHING_S), None)
        self.running = part
        if part is not None:
            turn = part.turns[part.num_taken]
            self._turn_end_s = now_s + turn.seconds
            if turn.until_projected_s is not None:
                part.project(now_s + turn.until_projected_s)

    def end_turn(self) -> _Part | None:
        """End the current turn. Return the rank's work on the job if all its turns are now done, otherwise None."""
        part, self.running = self.running, None
        assert part is not None
        part.num_taken += 1
        if part.num_taken < len(part.turns):
            return None
        self.parts.remove(part)
        return part


class ChainTurns:
    """Simulated jobs of a prefill group of several ranks. Implements PrefillWork."""

    def __init__(self, num_ranks: int, cost: CostModel) -> None:
        self._ranks = [_Rank() for _ in range(num_ranks)]
        self._cost = cost
        self._lag_s: dict[int, float] = {}
        """Seconds from the end of a job's last turn to the job's first token, by job number."""
        self._open: dict[int, int] = {}
        """Number of ranks that have not finished their work on a job, by job number."""

    def __len__(self) -> int:
        return len(self._open)

    def add(self, number: int, plan: ChainPlan, now_s: float) -> None:
        behind: _Part | None = None
        turns = _turns(plan, self._cost)
        for place in reversed(range(len(plan.ranks))):
            before = plan.chunks[place].start - plan.chunks[0].start
            hop_s = self._cost.link.seconds(before * self._cost.kv_bytes)
            part = _Part(plan.job.due_s, number, turns[place], hop_s, is_first=not place, behind=behind)
            insort(self._ranks[plan.ranks[place]].parts, part, key=lambda each: each.order)
            behind = part
        self._open[number], self._lag_s[number] = len(plan.ranks), self._lag(plan)
        for rank in self._ranks:
            if rank.running is None:
                rank.begin_turn(now_s)

    def advance(self, now_s: float) -> Done:
        parts: list[tuple[int, Rank]] = []
        jobs: list[tuple[int, float]] = []
        while (at_s := self.next_turn_s) <= now_s + NOTHING_S:
            for index, rank in enumerate(self._ranks):
                if rank.next_s > at_s + NOTHING_S:
                    continue
                done = rank.end_turn() if rank.running else None
                rank.begin_turn(at_s)
                if done is not None:
                    parts.append((done.number, Rank(index)))
                    self._open[done.number] -= 1
                    if not self._open[done.number]:
                        del self._open[done.number]
                        jobs.append((done.number, at_s + self._lag_s.pop(done.number)))
        return parts, jobs

    @property
    def next_turn_s(self) -> float:
        return min(rank.next_s for rank in self._ranks)

    def _lag(self, plan: ChainPlan) -> float:
        cost = self._cost
        if cost.push is None:
            return cost.head_s
        bare = replace(cost, head_s=0.0, push=None)
        lengths = [len(chunk) for chunk in plan.chunks]
        return plan.ttft_s - float(chain_ttft(lengths, bare, BATON, cached=plan.chunks[0].start))


def _turns(plan: ChainPlan, cost: CostModel) -> list[list[_Turn]]:
    """Return the turns of each rank of the chain, in the order of the chain."""
    chunks = np.array([[len(chunk) for chunk in plan.chunks]], dtype=np.float64)
    work = work_of(chunks, cost, BATON, plan.chunks[0].start)
    return [_turns_of(work, place, cost, is_last=place + 1 == len(plan.chunks)) for place in range(len(plan.chunks))]


def _turns_of(work: LayerTimes, place: int, cost: CostModel, *, is_last: bool) -> list[_Turn]:
    """Return the turns of the rank at index `place` of the chain. Only the last rank computes beyond its last KV."""
    project, own, far, last_own, last_far = (
        float(each[0, place]) for each in (work.project, work.own, work.far, work.last_own, work.last_far)
    )
    own += max(cost.issue_s - project - own - far, 0.0)
    middle = _Turn(far + project, far + project + own)
    ends = [far, last_own] if is_last else [far, 0.0]
    turns = [_Turn(project, project + own), *[middle] * (cost.num_layers - 2)]
    if cost.num_layers == 1:
        turns, ends[0] = [], 0.0
    turns.append(_Turn(ends[0] + project, ends[0] + project + ends[1]))
    return [*turns, _Turn(None, last_far)] if is_last else turns
