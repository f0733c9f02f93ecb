"""Changes of groups (starts, drains, and changes of role), and the changes that lead from one allocation to another.

Pure. `orchestrator.autoscaling.autoscaler` decides on the allocation; `orchestrator.actuation` makes the changes.
"""

from dataclasses import dataclass
from enum import Enum

from orchestrator.autoscaling.demand import NO_BACKLOG, Backlog
from orchestrator.autoscaling.prediction import Allocation


class Move(Enum):
    """Kind of change to a group."""

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
    """Change to a number of groups, and its predicted duration."""

    move: Move
    num_groups: int
    takes_s: float
    """Predicted seconds until the groups serve in their new role, or have left."""


@dataclass(frozen=True)
class LeadTimes:
    """Durations of changes to groups."""

    cold_start_s: float
    """Seconds from the order to start a group until it serves."""
    flip_s: float
    """Seconds in which an idle group changes its role. Its weights stay loaded."""


@dataclass(frozen=True)
class FleetState:
    """Groups and waiting work at one moment."""

    target: Allocation
    """Numbers of groups after all changes in progress."""
    backlog: Backlog = NO_BACKLOG
    drain_prefill_s: float = 0.0
    """Predicted seconds until the prefill group with the least work is idle."""
    drain_generate_s: float = 0.0
    """Predicted seconds until the generation group with the least work is idle."""
    lends_ranks: bool = False
    """True if chains lend their last rank to the other role instead of changing their role as a whole."""


def actions_between(state: FleetState, after: Allocation, times: LeadTimes, most: int) -> tuple[Action, ...]:
    """Return the changes that lead from the state's target to `after`, changes of role first.

    If one role has too many groups and the other too few, a group changes its role instead of one group leaving and
    another starting. This is done if draining and changing is predicted to take less time than a cold start, or if
    another group would exceed the budget of `most` groups. Chains of several ranks lend and get back single ranks
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
