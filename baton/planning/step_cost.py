"""Cost of a generation engine's steps, learnt from the durations of its steps. There is one StepCost per engine. The
scheduling policy and the planner of drafts read it, and heartbeats report it.

A step lasts

    cost of decoding, of verifying drafts, or of draft steps     one WorkCost (`baton.planning.work_cost`)
    + prefill work * rate                                        the unit of work is the FLOPs of one token

If the engine replays CUDA graphs, there are three costs of decoding: one for steps without drafts, which the engine
launches before it has read the step before, one for steps that verify drafts, and one for draft steps. Otherwise all
steps have the same cost, and each lasts at least as long as the launches of its kernels. All costs start with a nominal
cost (`baton.planning.hardware`).

Costs of decoding are fitted to the latest steps of each kind that did not prefill. How the time of a step that also
prefills divides is not known, so such a step only adjusts the rate of prefill. If three steps in a row deviate in the
same direction from their predictions, the engine has become slower or faster. The times of earlier steps are then
scaled, and have a small weight. Some steps are not learnt from: those in which a kernel was compiled, and a single step
that takes several times as long as predicted.

A line is a kind of steps with its own cost. Shape suffixes: R kept steps, C columns of a StepWork.

Owned by the engine's thread. Any thread may read the costs. Does not read a clock.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from baton.planning.fit import fit_relative
from baton.planning.work_cost import StepWork, WorkCost

_KEPT_STEPS = 4
"""Number of latest steps that are kept for each kind of step. Steps of one kind have nearly the same amount of work."""
_KEPT_KINDS = 48
_NEW_STEPS = 8
"""Number of observed steps after which costs are fitted again."""
_SOON_STEPS = 3
"""Number of observed steps after which costs are fitted again if the latest steps are of a new kind, or deviate from
their predictions."""
_DRIFT = 1.15
"""Ratio of measured to predicted seconds, or its inverse, from which a step deviates."""
_OLD_WEIGHT = 0.2
"""Weight in the fit of steps that ran before the engine became slower or faster. Later steps have the weight 1. The
seconds of the earlier steps are multiplied by the ratio by which the engine has changed."""
_MOST_SCALED = 4
"""Maximum number of times that the seconds of a step are scaled. At the next time, the step is dropped."""
_STALL = 4.0
"""Ratio of measured to predicted seconds above which a step is not learnt from, unless there was another such step
among the `_STALL_STEPS` steps before it."""
_STALL_STEPS = 16
_GAIN = 0.4
"""Fraction of its deviation by which a step that prefilled adjusts the rate of prefill."""
_MOST_CHANGE = 0.2
"""Maximum relative change of the rate of prefill by one step."""
_LEAST_SHARE = 1 / 3
"""Minimum of the fraction of a step's time that its deviation is attributed to, if the step prefilled. If prefill takes
a smaller fraction, noise in the time of decoding would dominate."""
_FIRST_STEPS = 3
"""Number of first steps with prefill that replace the rate of prefill if they took more than `_FAR` times as long as
predicted, or less than 1 / `_FAR` times."""
_FAR = 2.0
_LEAST_PREFILL = 0.05
"""Minimum cost of prefill as a fraction of a step's time, if the cost is the step's time minus that of decoding. It
keeps the rate of prefill above zero, because later adjustments by a factor could not change a rate of zero."""
_PRIOR_WORKS = np.array(
    [[1, 1, 500, 0], [1, 1, 8000, 0], [1, 16, 8000, 0], [1, 64, 8000, 0], [1, 64, 64000, 0], [1, 16, 8000, 24000.0]]
)
"""Columns of steps that are added to each fit with the seconds of the start value, scaled to the measured steps. They
decide how the time divides where measured steps do not, for example if all of them have the same batch size."""
_PRIOR_WEIGHT = 0.02
_TINY_S = 1e-12


class StepKind(IntEnum):
    """Kind of a step. Kinds may differ in cost."""

    PLAIN = 0
    """The step verifies no drafts."""
    VERIFYING = 1
    DRAFT = 2
    """The step makes drafts."""


@dataclass(frozen=True)
class LearntCosts:
    """Costs that an engine has learnt from its steps."""

    plain: WorkCost
    """Cost of steps that decode one token of each sequence, and of the decoding part of steps that also prefill."""
    verifying: WorkCost
    """Cost of the decoding part of steps that verify drafts. It differs from `plain` if steps replay CUDA graphs."""
    prefill_s: float
    """Seconds per unit of prefill work. The unit is the FLOPs of one token without attention."""
    num_steps: int
    """Number of observed steps. 0 if all costs are start values."""


class StepCost:
    """Estimate of the cost of an engine's steps, which is updated by observed steps."""

    def __init__(self, cost: WorkCost, launch_s: float = 0.0, num_compiled: Callable[[], int] = lambda: 0) -> None:
        """Create an estimate. It starts with `cost`, whose `token_s` (above 0) is also the time of a unit of prefill
        work. `launch_s`: minimum seconds of a step whose kernels are launched one by one; 0 on a CPU. `num_compiled`
        returns the number of kernels compiled so far. A step during which it rises is ignored."""
        self.prefill_s = cost.token_s
        """Seconds per unit of prefill work."""
        self.is_decode_due = False
        """True if the time of decoding should be measured, because a step took less than decoding alone was predicted
        to take, although it also prefilled."""
        self._replays = False
        self._launch_s = launch_s
        self._nominal = cost
        self._start = replace(cost, step_s=max(cost.step_s, launch_s))
        """Start value of all costs."""
        self._costs = [self._start] * len(StepKind)
        self._num_compiled = num_compiled
        self._num_seen_compiled = num_compiled()
        self._num_steps = self._num_prefills = 0
        self._stalled_at = -_STALL_STEPS
        """Number of the latest step that took more than `_STALL` times as long as predicted."""
        self._rows: dict[tuple[int, ...], int] = {}
        """Row of the next step of each kind in the arrays. The kind of the latest step is the last."""
        num_rows = _KEPT_KINDS * _KEPT_STEPS
        self._columns_RC = np.zeros((num_rows, 4))
        self._seconds_R = np.zeros(num_rows)
        """Measured seconds of each kept step. 0: the row is not used."""
        self._line_R, self._number_R, self._num_scaled_R = np.zeros((3, num_rows), np.int64)
        """Line and number of each kept step, and how often its seconds were scaled."""
        self._num_new = [0, 0, 0]
        """Number of steps since the latest fit of each line. It is raised if the line is to be fitted earlier."""
        self._fitted: list[set[tuple[int, ...]]] = [set(), set(), set()]
        """Kinds of steps of which the latest fit of each line had some."""
        self._ratios: list[dict[int, float]] = [{}, {}, {}]
        """Ratios of measured to predicted seconds since the latest fit of each line, by number of the step. Only steps
        of kinds in `_fitted` show whether the engine has become slower or faster."""
        self._same_since = [0, 0, 0]
        """Number of the first step of each line since the engine became slower or faster."""

    def replay_graphs(self) -> None:
        """Record that all steps replay CUDA graphs. Must be called before the first step."""
        self._replays, self._launch_s, self._start = True, 0.0, self._nominal
        self._costs = [self._start] * len(StepKind)

    @property
    def plain(self) -> WorkCost:
        """Cost of a step without drafts, or of its decoding part if it also prefills."""
        return self._costs[self._line(StepKind.PLAIN)]

    @property
    def verifying(self) -> WorkCost:
        """Cost of a step that verifies drafts, or of its decoding part if it also prefills."""
        return self._costs[self._line(StepKind.VERIFYING)]

    @property
    def drafting(self) -> WorkCost:
        """Cost of draft steps."""
        return self._costs[self._line(StepKind.DRAFT)]

    @property
    def learnt(self) -> LearntCosts:
        """Current costs, as an immutable value."""
        return LearntCosts(self.plain, self.verifying, self.prefill_s, self._num_steps)

    def observe(self, work: StepWork, prefill_work: float, seconds: float, kind: StepKind = StepKind.PLAIN) -> None:
        """Record a step that took `seconds`. `work` is the work of decoding, of verifying drafts, or of draft steps.
        `prefill_work` is the work of prefill in the same step; 0 if it did not prefill."""
        num_compiled, self._num_seen_compiled = self._num_seen_compiled, self._num_compiled()
        if seconds <= 0 or num_compiled != self._num_seen_compiled:
            return
        self._num_steps += 1
        line, launch_s = self._line(kind), self._launch_s
        decode_s, prefill_s = self._costs[line].seconds(work), prefill_work * self.prefill_s
        predicted_s = max(decode_s + prefill_s, launch_s, _TINY_S)
        ratio = seconds / predicted_s
        is_known = self._num_prefills if prefill_work else self._same_since[line]
        if ratio > _STALL and is_known:
            before, self._stalled_at = self._stalled_at, self._num_steps
            if self._num_steps - before > _STALL_STEPS:
                return
        self.is_decode_due = prefill_work > 0 and seconds * _DRIFT < decode_s
        if not prefill_work:
            self._keep(line, work, seconds, ratio)
            return
        self._num_prefills += 1
        if self.is_decode_due:
            return  # nothing is left for prefill
        is_far = not 1 / _FAR < ratio < _FAR and self._num_prefills <= _FIRST_STEPS
        if is_far:
            self.prefill_s = max(seconds - decode_s, _LEAST_PREFILL * seconds) / prefill_work
        elif prefill_s > launch_s / 2 or ratio > _FAR:  # otherwise launching kernels takes most of the time
            change = _GAIN * (ratio - 1) / max(prefill_s / predicted_s, _LEAST_SHARE)
            self.prefill_s *= 1 + min(max(change, -_MOST_CHANGE), _MOST_CHANGE)

    def _line(self, kind: StepKind) -> int:
        """Return the line of steps of a kind."""
        return kind if self._replays else StepKind.PLAIN

    def _keep(self, line: int, work: StepWork, seconds: float, ratio: float) -> None:
        """Keep a step without prefill, and fit the costs again if they are due."""
        num_queries = round(work.num_pairs / max(work.num_keys, 1))  # for each key
        kind = (line, work.num_steps, work.num_tokens, (work.num_keys**2).bit_length(), num_queries)
        row = self._rows.pop(kind, None)
        if row is None:
            self._num_new[line] = max(self._num_new[line], _NEW_STEPS - _SOON_STEPS)
            row = len(self._rows) * _KEPT_STEPS
            if len(self._rows) == _KEPT_KINDS:
                row = self._rows.pop(next(iter(self._rows))) // _KEPT_STEPS * _KEPT_STEPS
                self._seconds_R[row : row + _KEPT_STEPS] = 0.0
        self._columns_RC[row], self._seconds_R[row] = work.columns, seconds
        self._line_R[row], self._number_R[row], self._num_scaled_R[row] = line, self._num_steps, 0
        self._rows[kind] = row + 1 if (row + 1) % _KEPT_STEPS else row + 1 - _KEPT_STEPS
        self._num_new[line] += 1
        ratios = self._ratios[line]
        if not self._same_since[line]:
            self._same_since[line], self._num_new[line] = self._num_steps, _NEW_STEPS
        elif kind in self._fitted[line]:
            ratios[self._num_steps] = ratio
            latest = list(ratios.values())[-_SOON_STEPS:]
            if len(latest) == _SOON_STEPS and (min(latest) > _DRIFT or max(latest) < 1 / _DRIFT):
                self._same_since[line] = list(ratios)[-_SOON_STEPS]
                self._scale(line, sorted(latest)[_SOON_STEPS // 2])
                self._num_new[line] = _NEW_STEPS
        if self._num_new[line] >= _NEW_STEPS:
            self._fit(line)

    def _scale(self, line: int, ratio: float) -> None:
        """Scale the seconds of the steps that ran before the engine became slower or faster by `ratio`. Drop steps that
        were scaled `_MOST_SCALED` times, because the errors of all ratios multiply."""
        is_old_R = (self._line_R == line) & (self._number_R < self._same_since[line])
        self._seconds_R[is_old_R] *= np.where(self._num_scaled_R[is_old_R] < _MOST_SCALED, ratio, 0.0)
        self._num_scaled_R[is_old_R] += 1

    def _fit(self, line: int) -> None:
        """Fit the cost of a line to its kept steps."""
        self._ratios[line].clear()
        is_kept = (self._seconds_R > 0).reshape(-1, _KEPT_STEPS).max(axis=1).tolist()  # of the steps of each kind
        self._fitted[line] = {kind for kind, row in self._rows.items() if is_kept[row // _KEPT_STEPS]}
        self._num_new[line] = 0
        rows = ((self._line_R == line) & (self._seconds_R > 0)).nonzero()[0]
        weights = np.where(self._number_R[rows] < self._same_since[line], _OLD_WEIGHT, 1.0)
        columns, seconds = self._columns_RC[rows], self._seconds_R[rows]
        start_C = np.array(list(vars(self._start).values()))
        scale = float(np.median(seconds / (columns @ start_C)))
        costs, _ = fit_relative(
            np.concatenate((columns, _PRIOR_WORKS)),
            np.concatenate((seconds, scale * (_PRIOR_WORKS @ start_C))),
            np.concatenate((weights, np.full(len(_PRIOR_WORKS), _PRIOR_WEIGHT))),
        )
        self._costs[line] = WorkCost(*costs)
