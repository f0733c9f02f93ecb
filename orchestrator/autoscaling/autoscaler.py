"""The autoscaler: observes traffic, and decides regularly which groups start, leave or change their role.

Up    as soon as the prediction for the time after a cold start misses a target: to the cheapest allocation that meets
      both; if none in the budget does, to the one that serves most requests in time
Down  when fewer groups would meet both targets with `MARGIN` more traffic, for a whole cool-down
Flip  in place of a new group: where the role of a group that is to leave can be changed sooner than a new group starts,
      or where the budget has no room for a new one before another has left
Lend  a rank in place of a new generation group, for the same reasons, where chains have several ranks: the chain
      continues without it, and gets it back when prompts need it

Nothing changes before an answer has ended, unless that takes `PATIENCE_S`: until then their lengths are a guess.
A change that gains little waits until the miss has been predicted for `PATIENCE_S`, and is not made if it takes back
another one within a cool-down. Each decision carries its explanation. Actuates nothing: `deploy` carries decisions out.
Pure: the caller gives the time.
"""

from dataclasses import dataclass

from orchestrator.autoscaling.actions import Action, FleetState, LeadTimes, actions_between
from orchestrator.autoscaling.allocation import best_by_lending, cheapest_within_targets, is_better, most_good
from orchestrator.autoscaling.demand import ServiceModel
from orchestrator.autoscaling.prediction import Allocation, Prediction, Predictor
from orchestrator.autoscaling.traffic import TrafficWindow
from orchestrator.requests.config import AutoscalingConfig

MARGIN = 1.2
"""Factor of further traffic that a smaller allocation must bear."""
PATIENCE_S = 10.0
"""Seconds for which a target must have been missed before a change that gains fewer is made."""


@dataclass(frozen=True)
class _Bar:
    """Minimum gain of a change, in requests that meet the targets: a share of all requests, or a factor on the present
    number of them. The factor compares allocations where all are overloaded. One of the two suffices."""

    share: float
    factor: float

    def is_reached(self, present: Prediction, wanted: Prediction) -> bool:
        gain = wanted.good_share - present.good_share
        return gain >= self.share or wanted.good_share >= self.factor * present.good_share


_WORTH_IT = _Bar(0.05, 1.25)
"""Bar of a change where no allocation meets the targets."""
_URGENT = _Bar(0.3, 2.0)
"""Bar of a change that is made at once."""
_TAKING_BACK = _Bar(0.3, 8.0)
"""Bar of a change within a cool-down of another one, which it takes back."""


@dataclass(frozen=True)
class Decision:
    """Decision about the groups, with its explanation."""

    time_s: float
    before: Allocation
    after: Allocation
    actions: tuple[Action, ...]
    reason: str
    """Why, in a few words."""
    present: Prediction | None
    """Prediction for the present groups; None without traffic."""
    chosen: Prediction | None
    """Prediction for the desired groups; None without traffic."""
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


@dataclass(frozen=True)
class _Case:
    """One decision to be made, and the predictions for it."""

    now_s: float
    state: FleetState
    rate: float
    predictor: Predictor
    present: Prediction | None
    """Prediction for the present groups; None if a role has no group."""

    def decide(self, chosen: Prediction, actions: tuple[Action, ...], reason: str) -> Decision:
        """Return the decision for `chosen`."""
        before = self.state.target
        return Decision(self.now_s, before, chosen.allocation, actions, reason, self.present, chosen, self.rate)


class Autoscaler:
    """Decides for one cluster. Report requests to `window`, and call `decide` every `interval_s`."""

    def __init__(
        self, config: AutoscalingConfig, service: ServiceModel, times: LeadTimes, window: TrafficWindow | None = None
    ) -> None:
        self.window = window or TrafficWindow()
        """Observations of traffic; the caller reports arrivals and ends to it."""
        self.times = times
        """Durations of changes; the caller replaces them by its measurements."""
        self._config = config
        self._service = service
        self._enough_since_s: float | None = None
        """Time since which fewer groups would have been enough; None while they are not."""
        self._missed_since_s: float | None = None
        """Time since which a target would be missed; None while none would."""
        self._changed_s = -float("inf")
        self._leaned = 0
        """Direction of the last change: 1 towards prefill, -1 towards generation."""

    def decide(self, now_s: float, state: FleetState) -> Decision:
        """Return the decision for now; it has no actions when no change is needed."""
        traffic, target = self.window.forecast(now_s, self.times.cold_start_s), state.target
        if not traffic.rate and not state.backlog.num_requests:
            return self._idle(now_s, state)
        predictor = Predictor(self._service, traffic, self._config, state.backlog)
        if not target.num_prefill or not target.num_generate:
            wanted = cheapest_within_targets(predictor, self._config) or most_good(predictor, self._config)
            return self._change(_Case(now_s, state, traffic.rate, predictor, None), wanted, "traffic has come")
        present = predictor.predict(target)
        if self.window.is_guess(now_s, PATIENCE_S):
            return Decision(now_s, target, target, (), "no answer has ended yet", present, present, traffic.rate)
        case = _Case(now_s, state, traffic.rate, predictor, present)
        if present.meets(self._config) and target.total <= self._config.max:
            self._missed_since_s = None
            return self._fewer(case, present)
        self._enough_since_s = None
        return self._more(case, present)

    def _more(self, case: _Case, present: Prediction) -> Decision:
        """Return the decision while a target would be missed: more groups, or other roles."""
        least = min(case.state.target.total, self._config.max)
        wanted, reason = cheapest_within_targets(case.predictor, self._config, least), "a target would be missed"
        if wanted is None:
            wanted, reason = most_good(case.predictor, self._config), "no allocation in the budget meets the targets"
        if self._lends_soon(case.state):
            lending = best_by_lending(case.predictor, self._config, case.state.target, self._service.num_ranks)
            wanted = lending if is_better(lending, wanted, self._config) else wanted
        if not wanted.meets(self._config) and not _WORTH_IT.is_reached(present, wanted):
            return case.decide(present, (), f"{reason}, and none serves more")
        if self._missed_since_s is None:
            self._missed_since_s = case.now_s
        takes_back = self._takes_back(case.now_s, case.state.target, wanted.allocation)
        if takes_back and not _TAKING_BACK.is_reached(present, wanted):
            return case.decide(present, (), "too soon after the last change")
        if not _URGENT.is_reached(present, wanted) and case.now_s - self._missed_since_s < PATIENCE_S:
            return case.decide(present, (), f"{reason}, not yet for {PATIENCE_S:g} s")
        return self._change(case, wanted, reason)

    def _lends_soon(self, state: FleetState) -> bool:
        """Return whether a chain's rank takes the other role sooner than a new group starts, or where there is no room
        for one."""
        is_full = state.target.total >= self._config.max
        is_sooner = state.drain_prefill_s + self.times.flip_s < self.times.cold_start_s
        return state.lends_ranks and (is_full or is_sooner)

    def _fewer(self, case: _Case, present: Prediction) -> Decision:
        """Return the decision while the targets are met: fewer groups, once these have been enough for long."""
        wanted = cheapest_within_targets(case.predictor.busier(MARGIN), self._config)
        if wanted is None or wanted.allocation.total >= case.state.target.total:
            self._enough_since_s = None
            return case.decide(present, (), "targets are met")
        if self._enough_since_s is None:
            self._enough_since_s = case.now_s
        left_s = self._enough_since_s + self._config.cooldown_s - case.now_s
        if left_s > 0:
            return case.decide(present, (), f"{wanted.allocation} is enough, if so for another {left_s:.0f} s")
        self._enough_since_s = None
        return self._change(case, wanted, "fewer groups are enough")

    def _idle(self, now_s: float, state: FleetState) -> Decision:
        """Return the decision without traffic: as few groups as allowed, once there was none for a cool-down."""
        floor = Allocation(self._config.min // 2, self._config.min - self._config.min // 2)
        is_late = now_s - (self.window.latest_s or 0.0) >= self._config.cooldown_s
        if not is_late or state.target.total <= self._config.min:
            return Decision(now_s, state.target, state.target, (), "no traffic", None, None, 0.0)
        actions = actions_between(state, floor, self.times, self._config.max)
        return Decision(now_s, state.target, floor, actions, "no traffic for a cool-down", None, None, 0.0)

    def _change(self, case: _Case, wanted: Prediction, reason: str) -> Decision:
        """Return the decision for another allocation, and remember its direction."""
        actions = actions_between(case.state, wanted.allocation, self.times, self._config.max)
        if actions:
            self._changed_s, self._leaned = case.now_s, _lean(case.state.target, wanted.allocation)
        return case.decide(wanted, actions, reason)

    def _takes_back(self, now_s: float, before: Allocation, after: Allocation) -> bool:
        is_soon = now_s - self._changed_s < self._config.cooldown_s
        return is_soon and self._leaned * _lean(before, after) < 0


def _lean(before: Allocation, after: Allocation) -> int:
    """Return 1 for a change towards prefill, -1 for one towards generation, 0 for neither."""
    change = (after.num_prefill - before.num_prefill) - (after.num_generate - before.num_generate)
    return (change > 0) - (change < 0)
