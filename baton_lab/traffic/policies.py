"""Scaling policies for the simulator: the orchestrator's autoscaler, and two simpler policies for comparison.

    autoscale     `orchestrator.autoscaling`: forecasts, cost model and queueing
    queue         a threshold on queue lengths: adds a group to the role with the longer queue per group
    load          mean load divided by a group's throughput (load regression). Queueing is ignored. Other planners
                  scale in the same way

`queue` and `load` change the roles of groups and drain groups in the same way as the autoscaler, so the policies differ
only in their decisions. Does no I/O.
"""

import math
from collections import deque
from collections.abc import Iterable

from baton_lab.traffic.fleet import Fleet, Role, State
from baton_lab.traffic.results import ScalerEvent
from baton_lab.traffic.simulation import Simulation
from orchestrator.autoscaling.actions import Action, FleetState, LeadTimes, Move, actions_between
from orchestrator.autoscaling.autoscaler import Autoscaler
from orchestrator.autoscaling.demand import Backlog, ServiceModel
from orchestrator.autoscaling.prediction import Allocation
from orchestrator.requests.config import AutoscalingConfig

_WINDOW_S = 30.0
"""Length in seconds of the time window over which the load policy averages the rate and the lengths of requests."""
_FULL = 0.9
"""Target utilisation of groups in the load policy, as a fraction of a group's throughput."""
_FLIPS = {Move.FLIP_TO_PREFILL: Role.GENERATE, Move.FLIP_TO_GENERATE: Role.PREFILL}
_STARTS = {Move.START_PREFILL: Role.PREFILL, Move.START_GENERATE: Role.GENERATE}
_DRAINS = {Move.DRAIN_PREFILL: Role.PREFILL, Move.DRAIN_GENERATE: Role.GENERATE}


def target_of(fleet: Fleet) -> Allocation:
    """Return the number of groups that each role will have when all changes in progress are complete."""
    counts = dict.fromkeys(Role, 0)
    for member in fleet.members.values():
        if member.state is not State.DRAINING:
            counts[member.role] += 1
        elif member.flips:
            counts[member.role.other] += 1
    return Allocation(counts[Role.PREFILL], counts[Role.GENERATE])


def carry_out(fleet: Fleet, actions: Iterable[Action]) -> None:
    """Start groups, drain groups, or change their roles, as `actions` say.

    - To start a group: if a group of this role is draining in order to leave the cluster, cancel its drain. Otherwise
      start a new group.
    - To drain a group: choose a group that is still starting. If there is none, choose the ready group with the fewest
      requests.
    - To change a group's role: if a group is draining in order to change in the opposite direction, cancel its drain.
      Otherwise change the ready group with the fewest requests.
    """
    for action in actions:
        for _ in range(action.num_groups):
            if action.move in _STARTS:
                _start(fleet, _STARTS[action.move])
            else:
                flips = action.move in _FLIPS
                role = _FLIPS[action.move] if flips else _DRAINS[action.move]
                _drain(fleet, role, flips=flips)


def _start(fleet: Fleet, role: Role) -> None:
    """Cancel the drain of a group of that role, if one is draining; else start a new group."""
    leaving = [each for each in fleet.of(role, State.DRAINING) if not each.flips]
    if leaving:
        fleet.keep(max(leaving, key=lambda each: each.num_held))
    else:
        fleet.start(role)


def _drain(fleet: Fleet, role: Role, *, flips: bool) -> None:
    back = [each for each in fleet.of(role.other, State.DRAINING) if each.flips]
    if flips and back:
        fleet.keep(max(back, key=lambda each: each.num_held))
        return
    candidates = fleet.of(role, State.READY)
    if not flips:
        candidates = fleet.of(role, State.STARTING) or candidates
    if candidates:
        fleet.drain(min(candidates, key=lambda each: (each.num_held, -each.number)), flips=flips)


def between(before: Allocation, after: Allocation) -> tuple[Action, ...]:
    """Return the actions that change the numbers of groups from `before` to `after`. Where possible, a group changes
    its role, instead of one group being removed and another one started."""
    return actions_between(FleetState(before), after, LeadTimes(cold_start_s=math.inf, flip_s=0.0), before.total)


class AutoscalePolicy:
    """Adapter that runs the orchestrator's autoscaler in the simulator. It reports the simulated requests and groups to
    the autoscaler."""

    def __init__(self, config: AutoscalingConfig, service: ServiceModel, times: LeadTimes) -> None:
        self.interval_s = config.interval_s
        self._config = config
        self._service = service
        self._clear_s = times.cold_start_s
        self._autoscaler = Autoscaler(config, service, times)
        self._advised: Allocation | None = None
        """Numbers of groups in the autoscaler's latest advice, in advisory mode. None before the first advice."""

    def arrived(self, now_s: float, num_prompt_tokens: int) -> None:
        """Report to the autoscaler that a request has arrived."""
        self._autoscaler.window.arrived(now_s, num_prompt_tokens)

    def ended(self, now_s: float, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Report to the autoscaler that a request has ended."""
        self._autoscaler.window.ended(num_prompt_tokens, num_output_tokens)

    def scale(self, simulation: Simulation) -> list[ScalerEvent]:
        """Let the autoscaler decide, and carry out its decision. Return a list with the change. In advisory mode, the
        change is only returned. The list is empty if nothing changes, or if the advice is the same as before."""
        now_s, fleet = simulation.timeline.now_s(), simulation.fleet
        state = self._state(simulation, now_s)
        decision = self._autoscaler.decide(now_s, state)
        if not decision.actions:
            return []
        if self._config.mode == "advise":
            if decision.after == self._advised:
                return []
            self._advised = decision.after
        else:
            carry_out(fleet, decision.actions)
        return [ScalerEvent(now_s, f"{decision.before} -> {decision.after}", decision.text)]

    def _state(self, simulation: Simulation, now_s: float) -> FleetState:
        fleet = simulation.fleet
        prefill = [each for each in fleet.of(Role.PREFILL) if each.state is not State.STARTING]
        work_s = sum(max(each.free_at_s - now_s, 0.0) for each in prefill)
        num_waiting, num_tokens = simulation.waiting
        if num_waiting:
            work_s += num_waiting * self._service.prompt_s(max(num_tokens // num_waiting, 1))[0]
        num_requests = num_waiting + simulation.counts.num_prefilling + simulation.counts.num_unpulled
        ready = [each for each in fleet.of(Role.GENERATE, State.READY) if each.num_held]
        least = min(ready, key=lambda each: each.num_held, default=None)
        return FleetState(
            target_of(fleet),
            Backlog(work_s, num_requests, self._clear_s),
            drain_prefill_s=min((max(each.free_at_s - now_s, 0.0) for each in prefill), default=0.0),
            drain_generate_s=0.0 if least is None else least.batch.drain_s(now_s),
        )


class QueuePolicy:
    """Scaling policy with a threshold on queue lengths, as is common in autoscalers of stateless services."""

    def __init__(self, config: AutoscalingConfig) -> None:
        self.interval_s = config.interval_s
        self._config = config
        self._quiet_since_s: float | None = None
        self._changed_s = -math.inf

    def arrived(self, now_s: float, num_prompt_tokens: int) -> None:
        """Do nothing, because the policy only looks at queue lengths."""

    def ended(self, now_s: float, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Do nothing, because the policy only looks at queue lengths."""

    def scale(self, simulation: Simulation) -> list[ScalerEvent]:
        """Add a group to the role with the longer queue if the threshold is exceeded. Remove a group after a cool-down
        period with short queues. Return the changes."""
        now_s, fleet = simulation.timeline.now_s(), simulation.fleet
        before = target_of(fleet)
        queued = simulation.counts.num_prefilling / max(before.num_prefill, 1)
        num_slots = before.num_generate * simulation.sizes.num_slots
        used = (simulation.counts.num_generating + simulation.num_queued) / max(num_slots, 1)
        after = self._after(before, queued, used, now_s)
        if after == before:
            return []
        self._changed_s = now_s
        carry_out(fleet, between(before, after))
        change = f"{before} -> {after}"
        return [ScalerEvent(now_s, change, f"{change}: {queued:.1f} prompts a group, {used:.0%} of slots")]

    def _after(self, before: Allocation, queued: float, used: float, now_s: float) -> Allocation:
        wants_prefill, wants_generate = queued > 3, used > 0.85
        if queued > 0.5 or used > 0.5:
            self._quiet_since_s = None
        elif self._quiet_since_s is None:
            self._quiet_since_s = now_s
        if now_s - self._changed_s < 3 * self.interval_s:
            return before
        has_room = before.total < self._config.max
        if wants_prefill and (has_room or (before.num_generate > 1 and not wants_generate)):
            return Allocation(before.num_prefill + 1, before.num_generate - (0 if has_room else 1))
        if wants_generate and (has_room or (before.num_prefill > 1 and not wants_prefill)):
            return Allocation(before.num_prefill - (0 if has_room else 1), before.num_generate + 1)
        is_quiet = self._quiet_since_s is not None and now_s - self._quiet_since_s >= self._config.cooldown_s
        if is_quiet and before.total > max(self._config.min, 2):
            self._quiet_since_s = now_s
            takes_prefill = before.num_prefill >= before.num_generate
            return Allocation(before.num_prefill - takes_prefill, before.num_generate - (not takes_prefill))
        return before


class LoadPolicy:
    """Scaling policy that computes the number of groups of a role (prefill, generation) as the role's mean load,
    divided by the throughput of one group. A generation group's throughput is that of the largest batch whose step time
    meets the latency target. Queueing is ignored."""

    def __init__(self, config: AutoscalingConfig, service: ServiceModel) -> None:
        self.interval_s = config.interval_s
        self._config = config
        self._service = service
        self._arrivals: deque[tuple[float, int]] = deque()
        self._outputs: deque[tuple[float, int, int]] = deque()
        self._fewer_since_s: float | None = None

    def arrived(self, now_s: float, num_prompt_tokens: int) -> None:
        """Record the length of a prompt that has arrived."""
        self._arrivals.append((now_s, num_prompt_tokens))

    def ended(self, now_s: float, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Record the length of an answer that has ended."""
        self._outputs.append((now_s, num_prompt_tokens, num_output_tokens))

    def scale(self, simulation: Simulation) -> list[ScalerEvent]:
        """Set the number of groups of both roles according to their mean loads. Groups that are no longer needed are
        removed only after a cool-down period. Return the changes."""
        now_s, fleet = simulation.timeline.now_s(), simulation.fleet
        while self._arrivals and self._arrivals[0][0] < now_s - _WINDOW_S:
            self._arrivals.popleft()
        while self._outputs and self._outputs[0][0] < now_s - _WINDOW_S:
            self._outputs.popleft()
        if not self._arrivals or not self._outputs:
            return []
        before, wanted = target_of(fleet), self._wanted(min(now_s, _WINDOW_S))
        if wanted.total < before.total:
            self._fewer_since_s = now_s if self._fewer_since_s is None else self._fewer_since_s
            if now_s - self._fewer_since_s < self._config.cooldown_s:
                return []
        self._fewer_since_s = None
        if wanted == before:
            return []
        carry_out(fleet, between(before, wanted))
        change = f"{before} -> {wanted}"
        return [ScalerEvent(now_s, change, f"{change}: {len(self._arrivals)} requests in {_WINDOW_S:g} s")]

    def _wanted(self, seconds: float) -> Allocation:
        rate = len(self._arrivals) / seconds
        prompt = sum(tokens for _, tokens in self._arrivals) / len(self._arrivals)
        output = sum(tokens for _, _, tokens in self._outputs) / len(self._outputs)
        prefill = rate * self._service.prompt_s(max(round(prompt), 1))[0] / _FULL
        rows = self._rows(prompt + output / 2)
        generate = rate * output * self._service.planner.step_s(rows, prompt + output / 2) / (rows * _FULL)
        return _fit(max(prefill, 1e-9), max(generate, 1e-9), self._config)

    def _rows(self, context: float) -> int:
        """Return the largest batch whose step time does not exceed the target between tokens."""
        rows = self._service.num_slots
        while rows > 1 and self._service.planner.step_s(rows, context) > self._config.itl_p95_s:
            rows -= 1
        return rows


def _fit(prefill: float, generate: float, config: AutoscalingConfig) -> Allocation:
    """Return whole numbers of groups for these loads, reduced proportionally if they exceed the budget."""
    whole = Allocation(max(math.ceil(prefill), 1), max(math.ceil(generate), 1))
    if whole.total > config.max:
        num_prefill = min(max(round(config.max * prefill / (prefill + generate)), 1), config.max - 1)
        return Allocation(num_prefill, config.max - num_prefill)
    return Allocation(whole.num_prefill, max(whole.num_generate, config.min - whole.num_prefill))
