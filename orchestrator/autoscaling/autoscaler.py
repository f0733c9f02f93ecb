"""The autoscaler: observes traffic, and decides periodically which groups start, stop or change their role.

It makes four kinds of decisions:

- Up: the traffic forecast for the time after one cold start would miss a latency target. Scale to the smallest
  allocation that meets both targets. If no allocation in the budget meets them, scale to the one that serves the most
  requests within the targets.
- Down: fewer groups would meet both targets with `MARGIN` times the traffic, for a whole cool-down period.
- Flip: change the role of a group instead of stopping it and starting another one. This is done if it is faster than a
  cold start, or if the budget does not allow a new group before the other has stopped.
- Lend: if prefill groups are chains of several ranks, lend ranks for generation instead of starting generation groups.
  This is done in the same two cases as a flip. A chain continues without the lent rank, and gets the rank back when
  prompts need it.

The groups are not changed until the first answer has ended, because the lengths of answers are unknown before. This
wait lasts at most `PATIENCE_S` seconds from the first request. If a role has no group at all, a change is made at once.
A change with a small gain is made only after a miss has been predicted for `PATIENCE_S` seconds. A change that reverts
another one within a cool-down period is made only if its gain is large. Each decision has an explanation.
`orchestrator.actuation` applies the decisions. Does no I/O. The caller provides the time.
"""

from dataclasses import dataclass

from orchestrator.autoscaling.actions import Action, FleetState, LeadTimes, actions_between
from orchestrator.autoscaling.allocation import best_by_lending, cheapest_within_targets, is_better, most_good
from orchestrator.autoscaling.demand import ServiceModel
from orchestrator.autoscaling.prediction import Allocation, Prediction, Predictor
from orchestrator.autoscaling.traffic import TrafficWindow
from orchestrator.requests.config import AutoscalingConfig

MARGIN = 1.2
"""Safety factor for scaling down. A smaller allocation is chosen only if it meets the targets with this multiple of the
forecast traffic."""
PATIENCE_S = 10.0
"""Time in seconds for which a miss of a target must have been predicted before a change with a small gain is made. It
is also the maximum time, from the first request, during which the autoscaler waits for the first answer to end."""


@dataclass(frozen=True)
class _Bar:
    """Threshold for the gain of a change. Let x be the fraction of requests that meet the targets, from 0 to 1. The
    threshold is reached if the change adds at least `share` to x, or multiplies x by at least `factor`."""

    share: float
    factor: float

    def is_reached(self, present: Prediction, wanted: Prediction) -> bool:
        gain = wanted.good_share - present.good_share
        return gain >= self.share or wanted.good_share >= self.factor * present.good_share


_WORTH_IT = _Bar(0.05, 1.25)
"""Minimum gain of a change when no allocation meets both targets: it must add at least the first number to the fraction
of requests that meet the targets, or multiply this fraction by at least the second number."""
_URGENT = _Bar(0.3, 2.0)
"""Minimum gain of a change that is made immediately, without waiting for `PATIENCE_S` seconds: it must add at least the
first number to the fraction of requests that meet the targets, or multiply this fraction by at least the second
number."""
_TAKING_BACK = _Bar(0.3, 8.0)
"""Minimum gain of a change that reverts an earlier change less than one cool-down period after it: it must add at least
the first number to the fraction of requests that meet the targets, or multiply this fraction by at least the second
number."""


@dataclass(frozen=True)
class Decision:
    """Decision of the autoscaler: the allocation before and after, the changes to make, and the explanation."""

    time_s: float
    before: Allocation
    after: Allocation
    actions: tuple[Action, ...]
    reason: str
    """Reason for the decision, in a few words."""
    present: Prediction | None
    """Prediction for the present groups; None if there is no traffic or if a role has no group."""
    chosen: Prediction | None
    """Prediction for the allocation that was decided on; None if there is no traffic."""
    rate: float
    """Forecast traffic in requests per second."""

    @property
    def text(self) -> str:
        """Return one line for logs with the change, the reason and the predictions."""
        moves = ", ".join(f"{each.move.value} x{each.num_groups} in {each.takes_s:.1f} s" for each in self.actions)
        terms = [f"forecast {self.rate:.3g} requests/s"]
        terms += [f"now {self.present}"] if self.present else []
        terms += [f"then {self.chosen}"] if self.chosen and self.chosen != self.present else []
        return f"{self.before} -> {self.after} ({self.reason}): {moves or 'no change'}; {'; '.join(terms)}"


@dataclass(frozen=True)
class _Case:
    """Inputs of one decision: the time, the state of the groups, and the predictions."""

    now_s: float
    state: FleetState
    rate: float
    predictor: Predictor
    present: Prediction | None
    """Prediction for the present groups; None if a role has no group."""

    def decide(self, chosen: Prediction, actions: tuple[Action, ...], reason: str) -> Decision:
        """Return the decision to change to the allocation of `chosen` by `actions`. `reason` is the explanation."""
        before = self.state.target
        return Decision(self.now_s, before, chosen.allocation, actions, reason, self.present, chosen, self.rate)


class Autoscaler:
    """Decides on the number of groups of one cluster. The caller reports requests to `window`, and calls `decide` every
    `interval_s` seconds."""

    def __init__(
        self, config: AutoscalingConfig, service: ServiceModel, times: LeadTimes, window: TrafficWindow | None = None
    ) -> None:
        self.window = window or TrafficWindow()
        """Observed traffic. The caller reports the arrival and the end of each request to this window."""
        self.times = times
        """Expected durations of changes to groups. The caller replaces them with measured durations."""
        self._config = config
        self._service = service
        self._enough_since_s: float | None = None
        """Start of the present period in which fewer groups suffice: the `now_s` of the first call of `decide` that
        found this. None if no such period is in progress."""
        self._missed_since_s: float | None = None
        """Start of the present period in which a target is predicted to be missed: the `now_s` of the first call of
        `decide` that found a change that helps. None if no such period is in progress."""
        self._changed_s = -float("inf")
        self._leaned = 0
        """Direction of the latest change: 1 if it added groups to prefill relative to generation, -1 if it did the
        opposite, 0 if it did neither or if nothing was changed yet."""

    def decide(self, now_s: float, state: FleetState) -> Decision:
        """Return the decision at time `now_s` in seconds. The decision has no actions if no change is needed."""
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
        """Return the decision if a target is predicted to be missed: more groups, or other roles."""
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
        """Return True if chains lend ranks, and either lending is faster than starting a group, or the budget has no
        room for another group."""
        is_full = state.target.total >= self._config.max
        is_sooner = state.drain_prefill_s + self.times.flip_s < self.times.cold_start_s
        return state.lends_ranks and (is_full or is_sooner)

    def _fewer(self, case: _Case, present: Prediction) -> Decision:
        """Return the decision if the targets are met: fewer groups, if fewer have sufficed for a whole cool-down."""
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
        """Return the decision without traffic: the minimum number of groups, if there has been no traffic for a whole
        cool-down."""
        floor = Allocation(self._config.min // 2, self._config.min - self._config.min // 2)
        is_late = now_s - (self.window.latest_s or 0.0) >= self._config.cooldown_s
        if not is_late or state.target.total <= self._config.min:
            return Decision(now_s, state.target, state.target, (), "no traffic", None, None, 0.0)
        actions = actions_between(state, floor, self.times, self._config.max)
        return Decision(now_s, state.target, floor, actions, "no traffic for a cool-down", None, None, 0.0)

    def _change(self, case: _Case, wanted: Prediction, reason: str) -> Decision:
        """Return the decision for another allocation, and store the direction of the change."""
        actions = actions_between(case.state, wanted.allocation, self.times, self._config.max)
        if actions:
            self._changed_s, self._leaned = case.now_s, _lean(case.state.target, wanted.allocation)
        return case.decide(wanted, actions, reason)

    def _takes_back(self, now_s: float, before: Allocation, after: Allocation) -> bool:
        is_soon = now_s - self._changed_s < self._config.cooldown_s
        return is_soon and self._leaned * _lean(before, after) < 0


def _lean(before: Allocation, after: Allocation) -> int:
    """Return 1 for a change towards prefill, -1 for a change towards generation, 0 for neither."""
    change = (after.num_prefill - before.num_prefill) - (after.num_generate - before.num_generate)
    return (change > 0) - (change < 0)
