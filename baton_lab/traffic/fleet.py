"""Groups of the simulated cluster: their state, their work, and their cost.

A group starts, either cold or by a change of its role. It then serves until it is drained. When a drained group is
idle, it leaves the cluster or changes its role, as with `baton drain`. Work is never aborted. The cost of a group is
the number of seconds from its start until it leaves. Owned by `baton_lab.traffic.simulation`. Does no I/O.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import count, islice

from baton.planning.hardware import ModelCosts
from baton.types import Epoch
from baton_lab.traffic.events import Timeline
from baton_lab.traffic.gaps import GapHistogram
from baton_lab.traffic.service import GroupSizes
from baton_lab.traffic.work.batch import Batch
from baton_lab.traffic.work.chain_queue import PrefillWork, RankQueue
from baton_lab.traffic.work.chain_turns import ChainTurns
from orchestrator.membership.view import GenerationGroup, PrefillGroup


class Role(Enum):
    """Role of a group: prefill or generation."""

    PREFILL = "prefill"
    GENERATE = "generate"

    @property
    def other(self) -> "Role":
        """Return the opposite role: GENERATE for PREFILL, and PREFILL for GENERATE."""
        return Role.GENERATE if self is Role.PREFILL else Role.PREFILL


class State(Enum):
    """State of a group between its start and its end."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


@dataclass(eq=False)
class Member:
    """One group of the simulated cluster, in its current role."""

    number: int
    role: Role
    state: State
    since_s: float
    """Time at which the group was started, in seconds of simulated time. The group costs from this time on."""
    flips: bool = False
    """True: when the group is drained, it changes to the other role. False: it then leaves the cluster."""
    num_held: int = 0
    """Number of requests that the group serves: jobs of a prefill group, or used slots of a generation group."""
    free_at_s: float = 0.0
    """Estimated time at which a prefill group finishes all its jobs, in seconds of simulated time."""
    num_flips: int = 0
    """Number of times that the group has changed its role. In a real cluster, each change starts a new worker
    incarnation."""
    version: int = 0
    """Number of the event that was scheduled last for the group. Events that were scheduled earlier are outdated and
    ignored."""
    chain: PrefillWork = field(init=False)
    """Simulated work of the group while it is a prefill group."""
    batch: Batch = field(init=False)
    """Sequences that the group decodes while it is a generation group (simulated)."""
    prefill_view: PrefillGroup = field(init=False)
    """Description of the group that the orchestrator's code reads. Valid while the group has the prefill role."""
    generation_view: GenerationGroup = field(init=False)
    """Description of the group that the orchestrator's code reads. Valid while the group has the generation role."""


class Fleet:
    """All groups that are now in the simulated cluster."""

    def __init__(self, sizes: GroupSizes, costs: ModelCosts, timeline: Timeline, gaps: GapHistogram) -> None:
        self.on_change: Callable[[], None] = lambda: None
        """Callback that is called when the set of ready groups has changed."""
        self.on_row_end: Callable[[int, float], None] = lambda number, end_s: None
        """Callback that is called when a request ends, with the request's number and the time of its last token."""
        self._sizes = sizes
        self._costs = costs
        self._timeline = timeline
        self._gaps = gaps
        self._numbers = count()
        self.members: dict[int, Member] = {}
        """All groups that have not left the cluster, by the number that identifies the group."""
        self.num_ready = {Role.PREFILL: 0, Role.GENERATE: 0}
        """Number of ready groups of each role. Ready groups accept new work."""
        self._spent_s = 0.0
        self._by_work: list[tuple[float, int]] = []
        """Heap of ready prefill groups, as (estimated time at which the group finishes its jobs, group number). It may
        contain outdated entries, which are skipped."""
        self._by_room: list[dict[int, None]] = [{} for _ in range(sizes.num_slots + 1)]
        """Ready generation groups. Entry i contains the numbers (ids) of the groups of which i slots are in use."""

    def of(self, role: Role, *states: State) -> list[Member]:
        """Return the groups of a role that are in one of the given states. Without states, return all groups of the
        role."""
        return [each for each in self.members.values() if each.role is role and (not states or each.state in states)]

    def serves_prompts(self, member: Member) -> bool:
        """Return True if the group accepts new prompts, which means that it is a ready prefill group."""
        return member.role is Role.PREFILL and member.state is State.READY

    def group_s(self, now_s: float) -> float:
        """Return the cost of all groups up to the time `now_s`, in group-seconds, including groups that have left the
        cluster. Each group costs the seconds from its start until it leaves the cluster."""
        return self._spent_s + sum(now_s - each.since_s for each in self.members.values())

    def start(self, role: Role, *, after_s: float | None = None) -> None:
        """Start a new group in the given role. It becomes ready after `after_s` seconds; None: after the duration of a
        cold start."""
        now_s = self._timeline.now_s()
        member = Member(next(self._numbers), role, State.STARTING, now_s)
        self.members[member.number] = member
        wait_s = self._sizes.cold_start_s if after_s is None else after_s
        if wait_s:
            self._timeline.at(now_s + wait_s, partial(self._ready, member))
        else:
            self._ready(member)

    def drain(self, member: Member, *, flips: bool = False) -> None:
        """Drain a group: give it no new work. When the group is idle, it changes its role if `flips` is True; otherwise
        it leaves the cluster. A group that is still starting leaves immediately."""
        if member.state is State.STARTING:
            self._leave(member)
            return
        assert member.state is State.READY, f"group {member.number} is drained twice"
        member.state, member.flips = State.DRAINING, flips
        self.num_ready[member.role] -= 1
        if member.role is Role.GENERATE:
            del self._by_room[member.num_held][member.number]
        self.when_idle(member)
        self.on_change()

    def when_idle(self, member: Member) -> None:
        """If a group is draining and has no work left, complete the drain: change the group's role, or remove the
        group. Otherwise do nothing."""
        if member.state is not State.DRAINING or member.num_held:
            return
        if member.flips:
            member.role, member.state, member.flips = member.role.other, State.STARTING, False
            member.num_flips += 1
            self._timeline.at(self._timeline.now_s() + self._sizes.flip_s, partial(self._ready, member))
        else:
            self._leave(member)

    def keep(self, member: Member) -> None:
        """Cancel the drain of a group that is still draining, so that it gets new work again and keeps its role."""
        assert member.state is State.DRAINING
        member.flips = False
        self._serve(member)

    def hold(self, member: Member, change: int) -> None:
        """Add `change` (1 or -1) to the number of requests that a group serves."""
        before, member.num_held = member.num_held, member.num_held + change
        if member.role is Role.GENERATE and member.state is State.READY:
            del self._by_room[before][member.number]
            self._by_room[member.num_held][member.number] = None

    def work(self, member: Member, seconds: float) -> None:
        """Record that a prefill group was given a job. The job is estimated to start when the group's
        earlier jobs end, and to take `seconds`: its total compute time on all ranks, divided by the number of ranks."""
        member.free_at_s = max(member.free_at_s, self._timeline.now_s()) + seconds
        heapq.heappush(self._by_work, (member.free_at_s, member.number))

    def least_work(self, num_groups: int) -> list[Member]:
        """Return at most `num_groups` ready prefill groups: those that are estimated to finish their jobs first."""
        found: dict[int, tuple[float, Member]] = {}
        while self._by_work and len(found) < num_groups:
            free_at_s, number = heapq.heappop(self._by_work)
            member = self.members.get(number)
            is_current = member is not None and member.role is Role.PREFILL and member.state is State.READY
            if is_current and member is not None and member.free_at_s == free_at_s:
                found[number] = free_at_s, member
        for number, (free_at_s, _) in found.items():
            heapq.heappush(self._by_work, (free_at_s, number))
        return [member for _, member in found.values()]

    def most_room(self, num_groups: int) -> Iterator[Member]:
        """Yield at most `num_groups` ready generation groups with free slots: those with the most free slots, in
        descending order of free slots."""
        left = num_groups
        for held in islice(self._by_room, self._sizes.num_slots):
            for number in held:
                if not left:
                    return
                left -= 1
                yield self.members[number]

    def _ready(self, member: Member) -> None:
        if member.number in self.members and member.state is State.STARTING:
            if member.role is Role.PREFILL:
                num_ranks = self._sizes.num_ranks
                member.chain = ChainTurns(num_ranks, self._costs.prefill) if num_ranks > 1 else RankQueue()
                endpoints = tuple(f"node-{member.number}:{rank + 1}" for rank in range(num_ranks))
                name, store = f"group-{member.number}", f"store-{member.number}-{member.num_flips}"
                member.prefill_view = PrefillGroup(name, endpoints, Epoch(member.num_flips), prefix_store=store)
                member.free_at_s = self._timeline.now_s()
            else:
                member.batch = Batch(self._costs.step, self._gaps, lambda number, end_s: self.on_row_end(number, end_s))
                endpoint, slots = f"node-{member.number}:1", self._sizes.num_slots
                member.generation_view = GenerationGroup(f"group-{member.number}", endpoint, "", slots, 2**31)
            self._serve(member)

    def _serve(self, member: Member) -> None:
        member.state = State.READY
        self.num_ready[member.role] += 1
        if member.role is Role.GENERATE:
            self._by_room[member.num_held][member.number] = None
        else:
            heapq.heappush(self._by_work, (member.free_at_s, member.number))
        self.on_change()

    def _leave(self, member: Member) -> None:
        self._spent_s += self._timeline.now_s() - member.since_s
        del self.members[member.number]
