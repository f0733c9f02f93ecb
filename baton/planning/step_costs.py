"""Learns the cost of generation steps (`baton.planning.work_cost`) while steps run.

The first costs are measured by `baton calibrate --generate`, or follow from a model's bytes and FLOPs at nominal rates.
They are fitted to the latest steps of each kind. Owned by the engine's thread; has no clock.
"""

from collections import deque

from baton.planning.fit import fit_work
from baton.planning.work_cost import StepWork, WorkCost

_KEPT_STEPS = 4
"""Number of latest steps that are kept of each kind."""
_KEPT_KINDS = 48
_NEW_STEPS = 8
"""Number of observed steps after which costs are fitted again."""
_Kind = tuple[int, int, int, int]


class StepCosts:
    """Learns a WorkCost from observed steps."""

    def __init__(self, cost: WorkCost) -> None:
        """Begin with `cost`, which is measured or nominal."""
        self.cost = cost
        """Current estimate of the cost of steps."""
        self._steps: dict[_Kind, deque[tuple[StepWork, float]]] = {}
        self._num_new = 0

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn from a step that took `seconds`."""
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
