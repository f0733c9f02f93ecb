"""Estimates the cost of generation steps (`baton.planning.work_cost`) from the durations of steps that ran.

The initial costs are measured by `baton calibrate --generate`, or derived from the model's bytes and FLOPs and nominal
rates. They are fitted again to the latest steps of each kind. Owned by the engine's thread. Does not read a clock.
"""

from collections import deque

from baton.planning.fit import fit_work
from baton.planning.work_cost import StepWork, WorkCost

_KEPT_STEPS = 4
"""Number of latest steps that are kept for each kind of step. Steps of one kind have nearly the same amount of work."""
_KEPT_KINDS = 48
_NEW_STEPS = 8
"""Number of observed steps after which costs are fitted again."""
_Kind = tuple[int, int, int, int]


class StepCosts:
    """Estimate of the cost of generation steps, which is updated by observed steps."""

    def __init__(self, cost: WorkCost) -> None:
        """Create an estimate that starts with `cost`, which may be measured or nominal."""
        self.cost = cost
        """Current estimate of the cost of steps."""
        self._steps: dict[_Kind, deque[tuple[StepWork, float]]] = {}
        self._num_new = 0

    def observe(self, work: StepWork, seconds: float) -> None:
        """Record a step with the given work that took `seconds`. Fits the cost again after several steps, and after the
        first step of a new kind."""
        if seconds <= 0:
            return
        kind = _kind(work)
        latest = self._steps.pop(kind, None) or deque(maxlen=_KEPT_STEPS)
        latest.append((work, seconds))
        self._steps[kind] = latest  # the kind of the latest step is moved to the end
        if len(self._steps) > _KEPT_KINDS:
            del self._steps[next(iter(self._steps))]
        self._num_new += 1
        if self._num_new >= _NEW_STEPS or len(latest) == 1:
            self._num_new = 0
            self.cost, _ = fit_work([each for kept in self._steps.values() for each in kept], self.cost)


def _kind(work: StepWork) -> _Kind:
    """Return a key that is equal for steps with nearly the same amount of work."""
    return work.num_steps, work.num_tokens, (work.num_keys**2).bit_length(), round(work.num_pairs / work.num_keys)
