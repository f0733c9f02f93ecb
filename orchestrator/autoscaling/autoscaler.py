"""The autoscaler: observes traffic, and decides regularly which groups start, leave or change their role.

Up    as soon as the prediction for the time after a cold start misses a target: to the cheapest allocation that meets
      both; if none in the budget does, to the one that serves most requests in time
Down  when fewer groups would meet both targets with `MARGIN` more traffic, for a whole cool-down
Flip  in place of a new group: where the role of a group that is to leave can be changed sooner than a new group starts,
      or where the budget has no room for a new one before another has left

A change that gains little waits until the miss has been predicted for `PATIENCE_S`, and is not made if it takes back
another one within a cool-down. Each decision carries its explanation. Actuates nothing: `deploy` carries decisions out.
Pure: the caller gives the time.
"""

from dataclasses import dataclass
from enum import Enum

from orchestrator.autoscaling.allocation import cheapest_within_targets, most_good
from orchestrator.autoscaling.config import AutoscalingConfig
from orchestrator.autoscaling.demand import Backlog, ServiceModel
from orchestrator.autoscaling.prediction import Allocation, Prediction, Predictor
from orchestrator.autoscaling.traffic import TrafficForecast, TrafficWindow

MARGIN = 1.2
"""Factor of further traffic that a smaller allocation must bear."""
URGENT_GAIN = 0.3
"""Share of requests from which on a change that gains them is made at once."""
URGENT_FACTOR = 2.0
"""Factor by which a change that is made at once makes good requests more."""
PATIENCE_S = 10.0
"""Seconds for which a target must have been missed before a change that gains fewer is made."""
_WORTH_IT = 0.05
"""Share of requests that a change must gain where no allocation meets the targets."""


class Move(Enum):
    """The kinds of change to a group."""

    START_PREFILL = "start prefill"
    START_GENERATE = "start generate"
    DRAIN_PREFILL = "drain prefill"
    DRAIN_GENERATE = "drain generate"
    FLIP_TO_PREFILL = "flip generate to prefill"
    FLIP_TO_GENERATE = "flip prefill to generate"


@dataclass(frozen=True)
class Action:
    """A change to some groups, and when it will have taken effect."""

    move: Move
    num_groups: int
    takes_s: float
    """Predicted seconds until the groups serve in their new role, or have left."""


@dataclass(frozen=True)
class LeadTimes:
    """How long changes take."""

    cold_start_s: float
    """Seconds from the order for a new group until it serves."""
    flip_s: float
    """Seconds in which an idle group takes the other role; its weights stay loaded."""


@dataclass(frozen=True)
class FleetState:
    """The groups at one moment, and the work that waits."""

    target: Allocation
    """Groups that there will be once all changes under way are done."""
    backlog: Backlog
    drain_prefill_s: float = 0.0
    """Predicted seconds in which a prefill group ends the work that it has."""
    drain_generate_s: float = 0.0
    """Predicted seconds in which a generation group ends the streams that it has."""


@dataclass(frozen=True)
class Decision:
    """What is to be done about the groups, and why."""

    time_s: float
    before: Allocation
    after: Allocation
    actions: tuple[Action, ...]
    reason: str
    """Why, in a few words."""
    present: Prediction | None
    """Prediction for the groups as they are; None without traffic."""
    chosen: Prediction | None
    """Prediction for the groups as they are to be; None without traffic."""
    rate: float
    """Requests a second that are forecast."""

    @property
    def text(self) -> str:
        """Return the decision and its terms in one line for people."""
        moves = ", ".join(f"{each.move.value} x{each.num_groups} in {each.takes_s:.1f} s" for each in self.actions)
        terms = [f"forecast {self.rate:.3g} requests/s"]
        terms += [f"now {self.present}"] if self.present else []
        terms += [f"then {self.chosen}"] if self.chosen and self.chosen != self.present else []
        return f"{self.before} -> {self.after} ({self.reason}): {moves or 'no change'}; {'; '.join(terms)}"


class Autoscaler:
    """Decides for one cluster. Tell it of requests through `window`; ask `decide` every `interval_s`."""

    def __init__(self, config: AutoscalingConfig, service: ServiceModel, times: LeadTimes) -> None:
        self.window = TrafficWindow()
        """Observations of traffic; the caller tells it of arrivals and ends."""
        self._config = config
        self._service = service
        self._times = times
        self._enough_since_s: float | None = None
        """Time since which fewer groups would have been enough; None while they are not."""
        self._missed_since_s: float | None = None
        """Time since which a target would be missed; None while none would."""
        self._changed_s = -float("inf")
        self._leaned = 0
        """Direction of the last change: 1 towards prefill, -1 towards generation."""

    def decide(self, now_s: float, state: FleetState) -> Decision:
        """Return what is to be done now; a decision without actions when all is well."""
        traffic = self.window.forecast(now_s, self._times.cold_start_s)
        if not traffic.rate and not state.backlog.num_requests:
            return self._idle(now_s, state)
        predictor = Predictor(self._service, traffic, self._config, state.backlog)
        if not state.target.num_prefill or not state.target.num_generate:
            wanted = cheapest_within_targets(predictor, self._config) or most_good(predictor, self._config)
            return self._to(now_s, state, wanted.allocation, "traffic has come", None, wanted, traffic)
        present = predictor.predict(state.target)
        if present.meets(self._config) and state.target.total <= self._config.max:
            self._missed_since_s = None
            return self._fewer(now_s, state, present, predictor, traffic)
        self._enough_since_s = None
        wanted = cheapest_within_targets(predictor, self._config, state.target.total)
        reason = "a target would be missed"
        if wanted is None:
            wanted, reason = most_good(predictor, self._config), "no allocation in the budget meets the targets"
            if wanted.good_share - present.good_share < _WORTH_IT:
                return self._stay(now_s, state, f"{reason}, and none serves more", present, traffic)
        if self._missed_since_s is None:
            self._missed_since_s = now_s
        if not _is_urgent(present, wanted):
            if self._takes_back(now_s, state.target, wanted.allocation):
                return self._stay(now_s, state, "too soon after the last change", present, traffic)
            if now_s - self._missed_since_s < PATIENCE_S:
                return self._stay(now_s, state, f"{reason}, not yet for {PATIENCE_S:g} s", present, traffic)
        return self._to(now_s, state, wanted.allocation, reason, present, wanted, traffic)

    def _fewer(
        self, now_s: float, state: FleetState, present: Prediction, predictor: Predictor, traffic: TrafficForecast
    ) -> Decision:
        """Return the decision while the targets are met: fewer groups, once these have been enough for long."""
        wanted = cheapest_within_targets(predictor.busier(MARGIN), self._config)
        if wanted is None or wanted.allocation.total >= state.target.total:
            self._enough_since_s = None
            return self._stay(now_s, state, "targets are met", present, traffic)
        if self._enough_since_s is None:
            self._enough_since_s = now_s
        left_s = self._enough_since_s + self._config.cooldown_s - now_s
        if left_s > 0:
            return self._stay(
                now_s, state, f"{wanted.allocation} is enough, if so for {left_s:.0f} s", present, traffic
            )
        self._enough_since_s = None
        return self._to(now_s, state, wanted.allocation, "fewer groups are enough", present, wanted, traffic)

    def _idle(self, now_s: float, state: FleetState) -> Decision:
        """Return the decision without traffic: as few groups as allowed, once there was none for a cool-down."""
        latest_s = self.window.latest_s or 0.0
        floor = Allocation(self._config.min // 2, self._config.min - self._config.min // 2)
        is_idle = now_s - latest_s >= self._config.cooldown_s and state.target.total > self._config.min
        if not is_idle:
            return Decision(now_s, state.target, state.target, (), "no traffic", None, None, 0.0)
        actions = self._actions(state, floor)
        return Decision(now_s, state.target, floor, actions, "no traffic for a cool-down", None, None, 0.0)

    def _stay(
        self, now_s: float, state: FleetState, reason: str, present: Prediction, traffic: TrafficForecast
    ) -> Decision:
        return Decision(now_s, state.target, state.target, (), reason, present, present, traffic.rate)

    def _to(
        self,
        now_s: float,
        state: FleetState,
        after: Allocation,
        reason: str,
        present: Prediction | None,
        chosen: Prediction,
        traffic: TrafficForecast,
    ) -> Decision:
        actions = self._actions(state, after)
        if actions:
            self._changed_s, self._leaned = now_s, _lean(state.target, after)
        return Decision(now_s, state.target, after, actions, reason, present, chosen, traffic.rate)

    def _takes_back(self, now_s: float, before: Allocation, after: Allocation) -> bool:
        is_soon = now_s - self._changed_s < self._config.cooldown_s
        return is_soon and self._leaned * _lean(before, after) < 0

    def _actions(self, state: FleetState, after: Allocation) -> tuple[Action, ...]:
        """Return the changes that lead to `after`; flips first."""
        more_prefill = after.num_prefill - state.target.num_prefill
        more_generate = after.num_generate - state.target.num_generate
        actions = []
        if more_prefill * more_generate < 0:
            surplus_drain_s = state.drain_generate_s if more_prefill > 0 else state.drain_prefill_s
            flip_s = surplus_drain_s + self._times.flip_s
            num_flips = min(abs(more_prefill), abs(more_generate))
            if flip_s >= self._times.cold_start_s:  # then flip only what the budget cannot start anew
                num_flips = min(num_flips, max(num_flips - (self._config.max - state.target.total), 0))
            if num_flips:
                move = Move.FLIP_TO_PREFILL if more_prefill > 0 else Move.FLIP_TO_GENERATE
                actions.append(Action(move, num_flips, flip_s))
                sign = 1 if more_prefill > 0 else -1
                more_prefill, more_generate = more_prefill - sign * num_flips, more_generate + sign * num_flips
        for more, start, drain, drain_s in (
            (more_prefill, Move.START_PREFILL, Move.DRAIN_PREFILL, state.drain_prefill_s),
            (more_generate, Move.START_GENERATE, Move.DRAIN_GENERATE, state.drain_generate_s),
        ):
            if more > 0:
                actions.append(Action(start, more, self._times.cold_start_s))
            elif more < 0:
                actions.append(Action(drain, -more, drain_s))
        return tuple(actions)


def _is_urgent(present: Prediction, wanted: Prediction) -> bool:
    gain = wanted.good_share - present.good_share
    return gain >= URGENT_GAIN or (gain >= _WORTH_IT and wanted.good_share >= URGENT_FACTOR * present.good_share)


def _lean(before: Allocation, after: Allocation) -> int:
    """Return 1 for a change towards prefill, -1 for one towards generation, 0 for neither."""
    change = (after.num_prefill - before.num_prefill) - (after.num_generate - before.num_generate)
    return (change > 0) - (change < 0)
