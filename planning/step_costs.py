"""What a generation step costs, by what it multiplies, reads and compares; learnt while steps run.

A step of T tokens that reads S keys, and compares E pairs of query and key beyond one query a key, takes about

    base + T row + S key + E pair

A plain step of B rows has T = B and E = 0; one that verifies g drafts of a row of S keys adds g to T and g S to E; a
draft step has few keys. The four numbers begin as a model's bytes and FLOPs at nominal rates, and are fitted to the
latest steps of each kind. Owned by the engine's thread; has no clock.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from planning.fit import fit_relative
from planning.hardware import Hardware
from planning.model_shape import ModelShape

_KEPT_STEPS = 4
"""Latest steps kept of each kind."""
_KEPT_KINDS = 48
_NEW_STEPS = 8
"""Observed steps after which costs are fitted anew."""


@dataclass(frozen=True)
class StepWork:
    """Work of one step, or of several together."""

    num_tokens: int
    num_keys: int
    """Keys that are read, of all rows."""
    num_pairs: int
    """Pairs of query and key that are compared."""
    num_steps: int = 1

    @property
    def columns(self) -> tuple[int, int, int, int]:
        """Return the numbers that the costs are multiplied with."""
        return self.num_steps, self.num_tokens, self.num_keys, self.num_pairs - self.num_keys

    @property
    def kind(self) -> tuple[int, int, int, int]:
        """Return a key that is the same for steps of about the same work."""
        return self.num_steps, self.num_tokens, (self.num_keys**2).bit_length(), round(self.num_pairs / self.num_keys)


@dataclass(frozen=True)
class WorkCost:
    """Seconds that a step takes."""

    step_s: float
    """Seconds whatever the step does: the weights are read."""
    token_s: float
    """Seconds of a token's way through the matrices."""
    key_s: float
    """Seconds of reading a key and value, in all layers."""
    pair_s: float
    """Seconds of comparing a further query with a key that is read anyway, in all layers."""

    def seconds(self, work: StepWork) -> float:
        """Return the predicted seconds of some steps."""
        numbers = self.step_s, self.token_s, self.key_s, self.pair_s
        return sum(cost * number for cost, number in zip(numbers, work.columns, strict=True))


class StepCosts:
    """Learns a WorkCost from steps that ran."""

    def __init__(self, shape: ModelShape, rates: Hardware, *, weight_bytes: float) -> None:
        """Begin with nominal costs. `weight_bytes`: those of all weights that a step reads."""
        weights = shape.num_layers * shape.layer_weights + shape.vocab * shape.hidden
        self.cost = WorkCost(
            step_s=weight_bytes / rates.memory_bandwidth,
            token_s=2 * weights / rates.linear_flops,
            key_s=shape.num_layers * shape.kv_bytes / rates.memory_bandwidth,
            pair_s=shape.num_layers * shape.pair_flops / rates.pair_flops,
        )
        """The cost of steps as known now."""
        self._steps: dict[tuple[int, int, int, int], deque[tuple[StepWork, float]]] = {}
        self._num_new = 0

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn from a step that took so long."""
        if seconds <= 0:
            return
        latest = self._steps.pop(work.kind, None) or deque(maxlen=_KEPT_STEPS)
        latest.append((work, seconds))
        self._steps[work.kind] = latest  # the latest kind is the last
        if len(self._steps) > _KEPT_KINDS:
            del self._steps[next(iter(self._steps))]
        self._num_new += 1
        if self._num_new >= _NEW_STEPS or len(latest) == 1:
            self._fit()

    def _fit(self) -> None:
        """Fit the costs to all kept steps. The cost of pairs stays nominal until a step compared more than one query a
        key."""
        self._num_new = 0
        steps = [each for latest in self._steps.values() for each in latest]
        columns = np.array([work.columns for work, _ in steps], np.float64)
        num_known = 4 if columns[:, 3].any() else 3
        costs, _ = fit_relative(columns[:, :num_known], np.array([seconds for _, seconds in steps]))
        self.cost = WorkCost(*costs, *([self.cost.pair_s] if num_known == 3 else []))
