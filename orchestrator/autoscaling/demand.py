"""Computes the demand on the groups, from forecast traffic and waiting work: seconds of prefill, tokens, and sequences.

The durations are predicted by the planner that also plans requests. Waiting work includes KV that the generation groups
have not pulled yet. The waiting work is counted as additional traffic, spread over the time within which it should be
completed (`Backlog.clear_s`). Does no I/O.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from baton.planning.cost_model import CostModel
from baton.planning.planner import ChainPlanner
from baton.planning.step_cost import LearntCosts
from baton.types import TokenRange
from orchestrator.autoscaling.traffic import TrafficForecast

_SAMPLED = 8
"""Maximum number of prompt lengths per traffic class for which durations are predicted. If a class has more, a sample
is used."""
_BITS = 7
"""Number of significant bits to which prompt lengths are rounded. Seven bits give a precision of about one percent."""

_LEAST_STEPS = 256
"""Minimum number of steps from which a group must have learnt its costs, so that they replace the planner's."""


@dataclass(frozen=True)
class ServiceModel:
    """Predicts the durations of prefills and decode steps on one group. Uses the planner that also plans requests."""

    planner: ChainPlanner
    """Planner that predicts durations. It must plan chains of at least `num_ranks` ranks."""
    num_ranks: int
    num_slots: int
    step_costs: Mapping[str, LearntCosts] = field(default_factory=dict, compare=False)
    """Costs of steps that generation groups report, by group. The mapping may change at any time."""
    _known: dict[int, tuple[float, float]] = field(default_factory=dict, compare=False, repr=False)
    """Cached results of `prompt_s`, by the rounded number of tokens. They are valid for the cost model in `_costs`."""
    _costs: list[CostModel] = field(default_factory=list, compare=False, repr=False)
    """List with the one cost model that the cached results were computed with; empty if nothing is cached."""

    def prompt_s(self, num_tokens: int) -> tuple[float, float]:
        """Return two durations in seconds for a prompt of `num_tokens` tokens. The first is the time that the prompt
        occupies its prefill group. The second is the time to the first token on an idle group, including the transfer
        of KV.

        `num_tokens` is rounded to `_BITS` significant bits, so that results can be cached.
        """
        if self._costs != [self.planner.cost]:
            self._costs[:] = [self.planner.cost]
            self._known.clear()
        if (coarse := _rounded(num_tokens)) not in self._known:
            self._known[coarse] = self._predict_s(coarse)
        return self._known[coarse]

    def _predict_s(self, num_tokens: int) -> tuple[float, float]:
        chunks = self.planner.chunks(TokenRange(0, num_tokens), self.num_ranks)
        alone_s = self.planner.ttft_s(chunks)
        busy_s = sum(self.planner.rank_s(chunks)) / self.num_ranks
        return busy_s, alone_s + self.planner.transfer_s(num_tokens, alone_s)

    def step_s(self, rows: float, context: float) -> float:
        """Return the duration in seconds of a decode step of `rows` sequences. `context` is the mean context length of
        a sequence in tokens. Fewer than 1 sequence counts as 1. The result is the mean over the groups that have
        reported costs learnt from at least `_LEAST_STEPS` steps. Without such a group, the planner predicts it."""
        rows = max(rows, 1.0)
        learnt = [each.plain for each in self.step_costs.values() if each.num_steps >= _LEAST_STEPS]
        if not learnt:
            return self.planner.step_s(rows, context)
        return sum(cost.plain_s(rows, context) for cost in learnt) / len(learnt)


@dataclass(frozen=True)
class Backlog:
    """Work that has already arrived and is waiting."""

    prefill_s: float = 0.0
    """Seconds that a single prefill group would need to compute all prompts that have arrived and are not computed
    yet."""
    num_requests: int = 0
    """Number of requests that have arrived and have no output token yet. Requests whose KV waits to be pulled by a
    generation group are included."""
    clear_s: float = 30.0
    """Target time in seconds for completing the waiting work."""


NO_BACKLOG = Backlog()


class Demand:
    """Demand that a traffic forecast and waiting work place on the prefill and generation groups."""

    def __init__(self, service: ServiceModel, traffic: TrafficForecast) -> None:
        self.service = service
        self.gap_scv = traffic.gap_scv
        self._traffic = traffic
        self._backlog = NO_BACKLOG
        self._factor = 1.0

    def beside(self, backlog: Backlog, factor: float = 1.0) -> "Demand":
        """Return the demand of two parts together: the forecast traffic multiplied by `factor`, and the waiting work
        `backlog`. Reuses the predicted durations of this object."""
        made = Demand(self.service, self._traffic)
        made._backlog, made._factor = backlog, factor
        made._sampled, made._tokens = self._sampled, self._tokens
        return made

    @cached_property
    def rate(self) -> float:
        """Return the number of requests per second. Requests that are already waiting are included, spread over
        `Backlog.clear_s` seconds."""
        return self._traffic_rate + self._backlog.num_requests / self._backlog.clear_s

    @cached_property
    def prefill_work(self) -> float:
        """Return the prefill work that arrives per second, in seconds of one prefill group. A value of 2.5 keeps 2.5
        groups busy."""
        return self.prompt_s * self._traffic_rate + self._backlog.prefill_s / self._backlog.clear_s

    @cached_property
    def prompt_s(self) -> float:
        """Return the mean time in seconds that a prompt occupies a prefill group."""
        return float(self.shares @ self._busy_s)

    @cached_property
    def prompt_scv(self) -> float:
        """Return the squared coefficient of variation (variance divided by the squared mean) of the time that a prompt
        occupies a prefill group."""
        square = float(self.shares @ self._busy_s**2)
        return max(square / self.prompt_s**2 - 1, 0.0) if self.prompt_s else 0.0

    @cached_property
    def token_rate(self) -> float:
        """Return the number of output tokens per second that generation groups must produce. The first token of each
        request is not counted, because prefill produces it."""
        return self._tokens[0] * self.rate

    @cached_property
    def context(self) -> float:
        """Return the mean context length of a sequence in tokens."""
        return self._tokens[1]

    @property
    def _traffic_rate(self) -> float:
        return self._factor * self._traffic.rate

    @property
    def shares(self) -> NDArray[np.float64]:
        """Return, for each sampled prompt length, the fraction of all requests that it stands for. Shape: `[samples]`.
        The sum is 1."""
        return self._sampled[0]

    @property
    def alone_s(self) -> NDArray[np.float64]:
        """Return the predicted seconds to the first token on idle groups, for each sampled prompt length. Shape:
        `[samples]`."""
        return self._sampled[2]

    @property
    def _busy_s(self) -> NDArray[np.float64]:
        return self._sampled[1]

    @cached_property
    def _sampled(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        weights: list[float] = []
        times: list[tuple[float, float]] = []
        for each in self._traffic.classes:
            lengths = _spread(each.prompts)
            weights += [each.rate / len(lengths)] * len(lengths)
            computed = 1 - each.cached_share
            times += [self.service.prompt_s(max(round(length * computed), 1)) for length in lengths]
        busy_s, alone_s = np.array(times, dtype=np.float64).reshape(-1, 2).T
        shares = np.array(weights)
        return shares / max(float(shares.sum()), 1e-12), busy_s, alone_s

    @cached_property
    def _tokens(self) -> tuple[float, float]:
        """Return the mean number of output tokens per request without the first, and the mean context length of a
        sequence.

        The mean context length is weighted by the number of output tokens, because sequences with long answers are in
        the batch for longer.
        """
        tokens = keys = 0.0
        for each in self._traffic.classes:
            outputs = np.array(each.outputs, dtype=np.float64) - 1
            prompt = sum(each.prompts) / len(each.prompts)
            tokens += each.rate * float(outputs.mean())
            keys += each.rate * float((outputs * (prompt + outputs / 2)).mean())
        rate = self._traffic.rate
        return (tokens / rate if rate else 0.0), (keys / tokens if tokens else 0.0)


def _rounded(num_tokens: int) -> int:
    """Return the number rounded to `_BITS` significant bits."""
    shift = max(num_tokens.bit_length() - _BITS, 0)
    return (num_tokens + (1 << shift >> 1)) >> shift << shift


def _spread(lengths: Sequence[int]) -> list[int]:
    """Return at most `_SAMPLED` of the lengths, evenly spaced in their sorted order."""
    ordered = sorted(lengths)
    if len(ordered) <= _SAMPLED:
        return ordered
    return [ordered[int((place + 0.5) * len(ordered) / _SAMPLED)] for place in range(_SAMPLED)]
