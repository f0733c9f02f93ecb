"""Replays a trace against a simulated cluster, from the arrival of each request to its last token.

    arrival      the orchestrator's code for admission and its fair queue (`orchestrator.admission`). Both read the
                 simulator's clock
    placement    `baton_lab.traffic.placing`: compares groups with the orchestrator's code, and chooses the best
    prefill      `baton_lab.traffic.work.chain_queue`, `chain_turns`: ranks that run their jobs in the same order as the
                 prefill groups of a real cluster
    transfer     the seconds that the planner predicts until the generation group has the KV
    generation   `baton_lab.traffic.work.batch`: a batch of sequences, with step times from the planner. A sequence
                 joins between two steps, and its first token is sent at that time

A request occupies its slot from the placement to its last token, as in a real cluster. A scaling policy is called at
regular intervals and changes the groups. Not simulated: failures, speculation, prefill by generation groups, and
several transfers that share one link. Deterministic. Does no I/O.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np

from baton.errors import ResourceExhaustedError
from baton.types import JobId, Priority
from baton_lab.traffic.choosing import WholeChooser
from baton_lab.traffic.events import Timeline
from baton_lab.traffic.fleet import Fleet, Member, Role
from baton_lab.traffic.gaps import GapHistogram
from baton_lab.traffic.placing import Asked, Placer, Placing, Spot
from baton_lab.traffic.results import Results, ScalerEvent
from baton_lab.traffic.service import GroupSizes, RecallingPlanner
from baton_lab.traffic.traces.trace import Trace
from orchestrator.admission.fair_queue import FairQueue
from orchestrator.admission.gate import Admission, Entry
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.tenants import DEFAULT_TENANT, Tenant

UNBOUNDED = OrchestratorConfig(max_queued_requests=2**31, max_queued_tokens=2**62, max_running=2**31)
"""Orchestrator configuration that refuses no request, for studies of waiting times."""


@dataclass(frozen=True)
class SimulatedClaim:
    """Properties of a simulated request that the admission queue uses. Implements
    `orchestrator.admission.gate.Claim`."""

    num_tokens: int
    num_slots: int = 1
    tenant: Tenant = DEFAULT_TENANT
    priority: Priority = Priority.STANDARD
    deadline_s: float | None = None


@dataclass
class _Job:
    """State of one request from its arrival to its end."""

    number: int
    entry: Entry | None = None
    spot: Spot | None = None


class Scaler(Protocol):
    """Interface of a scaling policy in the simulator. It is called every `interval_s` seconds and may change the
    groups."""

    interval_s: float

    def arrived(self, now_s: float, num_prompt_tokens: int) -> None:
        """Record that a request has arrived, with its prompt length."""

    def ended(self, now_s: float, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Record that the last token of a request was sent, with the request's prompt and output lengths."""

    def scale(self, simulation: "Simulation") -> list[ScalerEvent]:
        """Change the groups of the simulation if needed. Return the changes with their reasons."""


@dataclass
class Counts:
    """Numbers of requests in progress, one for each stage."""

    num_prefilling: int = 0
    num_unpulled: int = 0
    """Number of requests whose KV is computed but has not arrived in the request's slot yet."""
    num_generating: int = 0


class Simulation:
    """One simulation of one trace. `run` may be called only once."""

    def __init__(
        self,
        trace: Trace,
        planner: RecallingPlanner,
        sizes: GroupSizes,
        allocation: tuple[int, int],
        *,
        scaler: Scaler | None = None,
        config: OrchestratorConfig = UNBOUNDED,
        max_blocks: int = 0,
        whole_chooser: bool = False,
    ) -> None:
        """Prepare the simulation of a trace. `allocation`: initial numbers of (prefill groups, generation groups), all
        of which are ready at the start. `scaler`: scaling policy; None keeps the initial numbers.

        `max_blocks`: number of KV blocks that the prefix cache of each prefill group can hold; 0: no prefix cache.
        `whole_chooser`: True to let the orchestrator's own code compare all groups for each request, False to compare
        only a few candidate groups.
        """
        self.trace, self.planner, self.sizes = trace, planner, sizes
        self.timeline, self.counts = Timeline(), Counts()
        self._gaps = GapHistogram()
        self._admission = Admission(config, self.timeline, FairQueue())
        self.fleet = Fleet(sizes, planner.nominal, self.timeline, self._gaps)
        self.fleet.on_row_end = lambda number, end_s: self.timeline.at(end_s, partial(self._end, number))
        self.placing: Placer = Placing(self.fleet, planner, config, self.timeline, max_blocks=max_blocks)
        if whole_chooser:
            chosen = replace(config, disaggregation="always", block_tokens=trace.block_tokens)
            self.placing = WholeChooser(self.fleet, planner, self.timeline, chosen)
        self._scaler = scaler
        self._jobs: dict[int, _Job] = {}
        self._unplaced: deque[_Job] = deque()
        self._first_s = np.full(len(trace), np.nan)
        self._end_s = np.full(len(trace), np.nan)
        self._num_left = len(trace)
        self._group_s = 0.0
        self._events: list[ScalerEvent] = []
        self.fleet.on_change = self._refit
        self._prompts, self._outputs = trace.prompt_tokens.tolist(), trace.output_tokens.tolist()
        for role, num_groups in zip((Role.PREFILL, Role.GENERATE), allocation, strict=True):
            for _ in range(num_groups):
                self.fleet.start(role, after_s=0.0)

    @property
    def num_queued(self) -> int:
        """Return the number of requests that wait for admission or for a group."""
        return self._admission.num_queued + len(self._unplaced)

    @property
    def waiting(self) -> tuple[int, int]:
        """Return the number of requests that wait for admission or for a group, and the sum of their prompt tokens."""
        num_tokens = sum(self._prompts[job.number] for job in self._unplaced)
        return self.num_queued, self._admission.num_queued_tokens + num_tokens

    def run(self) -> Results:
        """Simulate until every request has ended, and return the results."""
        self._schedule_arrival(0)
        if self._scaler is not None:
            self.timeline.at(self._scaler.interval_s, self._scale)
        self.timeline.run()
        assert not self._jobs, f"{len(self._jobs)} requests have not ended"
        return Results(
            self.trace,
            first_s=self._first_s,
            end_s=self._end_s,
            gaps=self._gaps,
            group_s=self._group_s,
            num_events=self.timeline.num_run,
            num_cached_tokens=self.placing.num_cached_tokens,
            scaler_events=tuple(self._events),
        )

    def _schedule_arrival(self, number: int) -> None:
        if number < len(self.trace):
            self.timeline.at(float(self.trace.arrivals_s[number]), partial(self._arrive, number))

    def _arrive(self, number: int) -> None:
        self._schedule_arrival(number + 1)
        if self._scaler is not None:
            self._scaler.arrived(self.timeline.now_s(), self._prompts[number])
        job = self._jobs[number] = _Job(number)
        try:
            job.entry = entry = self._admission.join(SimulatedClaim(self._prompts[number]))
        except ResourceExhaustedError:
            self._forget(job)
            return
        if entry.started_s is None:
            entry.on_turn = partial(self._turn, job)
        else:
            self._place(job)

    def _turn(self, job: _Job) -> None:
        """Schedule a request that has left the admission queue: place it if it was admitted, else drop it."""
        assert job.entry is not None
        self.timeline.at(0.0, partial(self._forget if job.entry.started_s is None else self._place, job))

    def _place(self, job: _Job) -> None:
        if self._unplaced or not self._placed(job):
            self._unplaced.append(job)

    def _placed(self, job: _Job) -> bool:
        now_s = self.timeline.now_s()
        blocks = self.trace.blocks[job.number] if self.trace.blocks else ()
        tokens = self._prompts[job.number], self._outputs[job.number]
        spot = self.placing.place(Asked(job.number, *tokens, blocks, self.trace.block_tokens))
        if spot is None:
            return False
        job.spot = spot
        self.counts.num_prefilling += 1
        self.fleet.hold(spot.prefill, 1)
        self.fleet.hold(spot.generation, 1)
        self.fleet.work(spot.prefill, sum(spot.plan.job.left_s.values()) / self.sizes.num_ranks)
        self.placing.prefill_queues.add(spot.prefill.prefill_view.incarnation, JobId(job.number), spot.plan.job, now_s)
        spot.prefill.chain.add(job.number, spot.plan, now_s)
        self._watch(spot.prefill, spot.prefill.chain.next_turn_s, self._advance_chain)
        return True

    def _place_waiting(self) -> None:
        while self._unplaced and self._placed(self._unplaced[0]):
            self._unplaced.popleft()

    def _watch(self, member: Member, time_s: float, advance: Callable[[Member], None]) -> None:
        """Call `advance` for a group at `time_s`, and invalidate the event scheduled for it before."""
        member.version += 1
        if time_s < float("inf"):
            self.timeline.at(time_s, partial(self._if_current, member, member.version, advance))

    def _if_current(self, member: Member, version: int, advance: Callable[[Member], None]) -> None:
        if member.version == version:
            advance(member)

    def _advance_chain(self, member: Member) -> None:
        now_s = self.timeline.now_s()
        parts, jobs = member.chain.advance(now_s)
        for number, rank in parts:
            self.placing.prefill_queues.release(member.prefill_view.incarnation, JobId(number), [rank], now_s)
        for number, end_s in jobs:
            spot = self._jobs[number].spot
            assert spot is not None
            self.counts.num_prefilling -= 1
            self.counts.num_unpulled += 1
            self.timeline.at(end_s + spot.transfer_s, partial(self._pulled, number))
        self._watch(member, member.chain.next_turn_s, self._advance_chain)

    def _pulled(self, number: int) -> None:
        """Add a request whose KV has arrived to the batch at the next step boundary, and send its first token, which
        arrived with the KV."""
        now_s, spot = self.timeline.now_s(), self._jobs[number].spot
        assert spot is not None
        self.counts.num_unpulled -= 1
        self.counts.num_generating += 1
        self.fleet.hold(spot.prefill, -1)
        self.fleet.when_idle(spot.prefill)
        member = spot.generation
        self._first_s[number] = first_s = member.batch.boundary_s(now_s)
        self.timeline.at(first_s, partial(self.placing.sent, number))
        if self._outputs[number] == 1:
            self.timeline.at(first_s, partial(self._end, number))
            return
        member.batch.join(number, self._prompts[number] + 1, self._outputs[number] - 1, now_s)
        self._watch(member, member.batch.next_end_s, self._advance_batch)

    def _advance_batch(self, member: Member) -> None:
        member.batch.advance()
        self._watch(member, member.batch.next_end_s, self._advance_batch)

    def _end(self, number: int) -> None:
        job, now_s = self._jobs[number], self.timeline.now_s()
        assert job.spot is not None
        self._end_s[number] = now_s
        self.placing.ended(number)
        self.counts.num_generating -= 1
        self.fleet.hold(job.spot.generation, -1)
        self.fleet.when_idle(job.spot.generation)
        if self._scaler is not None:
            self._scaler.ended(now_s, self._prompts[number], self._outputs[number])
        self._forget(job)
        self._place_waiting()

    def _forget(self, job: _Job) -> None:
        del self._jobs[job.number]
        self._num_left -= 1
        if not self._num_left:
            self._group_s = self.fleet.group_s(self.timeline.now_s())
        if job.entry is not None:
            self._admission.leave(job.entry)

    def _refit(self) -> None:
        """Update the number of slots in admission, and place requests that wait for a group."""
        self._admission.resize(self.fleet.num_ready[Role.GENERATE] * self.sizes.num_slots)
        self._place_waiting()

    def _scale(self) -> None:
        assert self._scaler is not None
        self._events += self._scaler.scale(self)
        if self._num_left:
            self.timeline.at(self.timeline.now_s() + self._scaler.interval_s, self._scale)
