"""Kinds of changes to groups: starts, drains, changes of role, and loans of ranks. `actions_between` lists the changes
that lead from one allocation of groups to another.

Does no I/O. `orchestrator.autoscaling.autoscaler` decides on the allocation; `orchestrator.actuation` makes the
changes.
"""

from dataclasses import dataclass
from enum import Enum

from orchestrator.autoscaling.demand import NO_BACKLOG, Backlog
from orchestrator.autoscaling.prediction import Allocation


class Move(Enum):
    """Kind of change to a group: a start, a drain, a change of role, or the loan or return of a rank."""

    START_PREFILL = "start prefill"
    START_GENERATE = "start generate"
    DRAIN_PREFILL = "drain prefill"
    DRAIN_GENERATE = "drain generate"
    FLIP_TO_PREFILL = "flip generate to prefill"
    FLIP_TO_GENERATE = "flip prefill to generate"
    LEND_RANK = "lend a rank to generate"
    RETURN_RANK = "return a rank to prefill"


@dataclass(frozen=True)
class Action:
    """Kind of change, the number of groups to which it is made, and the predicted duration of the change."""

    move: Move
    num_groups: int
    takes_s: float
    """Predicted seconds until the change is complete, i.e. until the groups serve in their new role or have stopped."""


@dataclass(frozen=True)
class LeadTimes:
    """Time that each kind of change to a group takes."""

    cold_start_s: float
    """Seconds from the order to start a group until the group serves requests."""
    flip_s: float
    """Seconds that an idle group needs to change its role. Its weights stay loaded."""


@dataclass(frozen=True)
class FleetState:
    """Groups of the cluster and the work that waits for them, at one moment."""

    target: Allocation
    """Number of groups of each role after all changes in progress have completed."""
    backlog: Backlog = NO_BACKLOG
    drain_prefill_s: float = 0.0
    """Predicted seconds, from now, until the prefill group with the least work is idle."""
    drain_generate_s: float = 0.0
    """Predicted seconds, from now, until the generation group with the least work is idle."""
    lends_ranks: bool = False
    """True if prefill chains lend single ranks for generation. False if groups change their role as a whole."""


def actions_between(state: FleetState, after: Allocation, times: LeadTimes, most: int) -> tuple[Action, ...]:
    """Return the changes that lead from the allocation `state.target` to the allocation `after`. Changes of role come
    first.

    If one role has too many groups and the other role too few, a group may change its role. This replaces the stop of
    one group and the start of another. It is done in two cases: if draining and changing the role is predicted to take
    less time than a cold start, or if the budget of `most` groups has no room to start a group before another one is
    stopped. If `state.lends_ranks` is true, groups do not change their role; single ranks are lent and returned
    instead.
    """
    lent = after.num_lent - state.target.num_lent
    prefill = after.num_prefill - state.target.num_prefill
    generate = after.num_generate - state.target.num_generate - lent
    drains_s = {Move.DRAIN_PREFILL: state.drain_prefill_s, Move.DRAIN_GENERATE: state.drain_generate_s}
    actions = []
    if lent > 0:
        actions.append(Action(Move.LEND_RANK, lent, state.drain_prefill_s + times.flip_s))
    elif lent < 0:
        actions.append(Action(Move.RETURN_RANK, -lent, state.drain_generate_s + times.flip_s))
    if prefill * generate < 0 and not state.lends_ranks:
        sign = 1 if prefill > 0 else -1
        surplus = Move.DRAIN_GENERATE if prefill > 0 else Move.DRAIN_PREFILL
        flip_s, num_flips = drains_s[surplus] + times.flip_s, min(abs(prefill), abs(generate))
        if flip_s >= times.cold_start_s:
            num_flips = min(num_flips, max(num_flips - (most - state.target.total), 0))
        if num_flips:
            actions.append(Action(Move.FLIP_TO_PREFILL if sign > 0 else Move.FLIP_TO_GENERATE, num_flips, flip_s))
        prefill, generate = prefill - sign * num_flips, generate + sign * num_flips
    for more, start, drain in (
        (prefill, Move.START_PREFILL, Move.DRAIN_PREFILL),
        (generate, Move.START_GENERATE, Move.DRAIN_GENERATE),
    ):
        if more > 0:
            actions.append(Action(start, more, times.cold_start_s))
        elif more < 0:
            actions.append(Action(drain, -more, drains_s[drain]))
    return tuple(actions)
