"""Simulation of a prefill group in virtual time. The width policy, the queues and the job schedulers are the product's;
durations come from the cost model.

A rank runs one turn (one layer of one job) after another, without interruption. When a turn ends, its KV is available
on the next rank at once.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from baton.planning.planner import ChainPlanner
from baton.types import Epoch, JobId, Rank, RequestId, TokenRange
from orchestrator.membership.prefill_queues import PrefillQueues
from orchestrator.placement.chain_width import ChainPlan, PromptChains
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.tenants import DEFAULT_TENANT, Tenant
from prefill_workers.chain import ChainJob
from prefill_workers.job import Job
from prefill_workers.job_scheduler import JobScheduler


@dataclass(frozen=True)
class Arrival:
    """A prompt that arrives at time `at_s`."""

    at_s: float
    num_tokens: int
    tenant: Tenant = DEFAULT_TENANT


@dataclass(frozen=True)
class Served:
    """Result of one prompt: the time in seconds from its arrival to its end, and its plan."""

    ttft_s: float
    plan: ChainPlan


@dataclass
class SimulatedJob:
    """One job on one rank, as the job scheduler sees it."""

    job: Job
    turn_s: float
    """Duration of one layer in seconds."""
    num_layers: int
    num_received: int
    num_done: int = 0

    @property
    def runnable(self) -> bool:
        return self.num_done < min(self.num_received, self.num_layers)

    @property
    def over(self) -> bool:
        return self.num_done == self.num_layers


_LIFE = "the group's incarnation"


@dataclass
class SimulatedGroup:
    """Simulated ranks and their future events. `now_s` is the time of the latest processed event."""

    planner: ChainPlanner
    config: OrchestratorConfig
    num_ranks: int
    now_s: float = 0.0
    sequencers: list[JobScheduler] = field(init=False)
    served: dict[JobId, Served] = field(default_factory=dict)
    _backlog: PrefillQueues = field(default_factory=PrefillQueues)
    _busy: set[Rank] = field(default_factory=set)
    _plans: dict[JobId, tuple[float, ChainPlan]] = field(default_factory=dict)
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _count: "itertools.count[int]" = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.sequencers = [JobScheduler() for _ in range(self.num_ranks)]

    def run(self, arrivals: Sequence[Arrival]) -> list[Served]:
        """Run all prompts, which are sorted by arrival time. Return the results in the order of `arrivals`."""
        for number, arrival in enumerate(arrivals):
            self._at(arrival.at_s, lambda number=number, arrival=arrival: self._arrive(JobId(number), arrival))  # type: ignore[misc]
        while self._events:
            self.now_s, _, happen = heapq.heappop(self._events)
            happen()
        assert not len(self._backlog) and not any(len(job_scheduler) for job_scheduler in self.sequencers)
        return [self.served[JobId(number)] for number in range(len(arrivals))]

    def _at(self, at_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._count), happen))

    def _arrive(self, number: JobId, arrival: Arrival) -> None:
        tokens = TokenRange(0, arrival.num_tokens)
        pending = self._backlog.pending(_LIFE, self.now_s)
        plan = PromptChains(self.planner, self.config, tokens, arrival.tenant).plan(self.num_ranks, pending, self.now_s)
        self._plans[number] = self.now_s, plan
        self._backlog.add(_LIFE, number, plan.job, self.now_s)
        prompt = range(arrival.num_tokens)
        job = Job(number, Epoch(1), RequestId("r"), 1, plan.ranks, plan.chunks, prompt, due_s=plan.job.due_s)
        num_layers = self.planner.cost.num_layers
        for rank, rank_s in plan.job.left_s.items():
            num_received = num_layers if rank == plan.ranks[0] else 0
            simulated = SimulatedJob(job, rank_s / num_layers, num_layers, num_received)
            self.sequencers[rank].add(cast(ChainJob, simulated))
        for rank in plan.ranks:
            self._serve(rank)

    def _serve(self, rank: Rank) -> None:
        found = self.sequencers[rank].next_runnable()
        if rank in self._busy or found is None:
            return
        self._busy.add(rank)
        job = cast(SimulatedJob, found)
        project_s = self.planner.cost.project_share * job.turn_s
        behind = job.job.ranks[job.job.ranks.index(rank) + 1 :]
        if behind:
            self._at(self.now_s + project_s, lambda: self._receive(behind[0], job.job.number))
        self._at(self.now_s + job.turn_s, lambda: self._end(rank, job))

    def _receive(self, rank: Rank, number: JobId) -> None:
        job = cast(SimulatedJob, self.sequencers[rank].get(number))
        job.num_received += 1
        self._serve(rank)

    def _end(self, rank: Rank, job: SimulatedJob) -> None:
        self._busy.remove(rank)
        job.num_done += 1
        for over in self.sequencers[rank].take_over():
            number = over.job.number
            self._backlog.release(_LIFE, number, (rank,), self.now_s)
            arrived_s, plan = self._plans[number]
            if rank == plan.ranks[-1]:
                self.served[number] = Served(self.now_s - arrived_s, plan)
        self._serve(rank)


def mean_ttft_s(served: Sequence[Served]) -> float:
    return sum(each.ttft_s for each in served) / len(served)
