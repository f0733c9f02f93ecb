"""Demand on the groups, from forecast traffic and waiting work: seconds of prefill, tokens, and sequences.

The durations are predicted by the planner that also plans requests. Waiting work, including KV that has not been
pulled, is counted as additional traffic during the time in which it should be done. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from baton.planning.cost_model import CostModel
from baton.planning.planner import ChainPlanner
from baton.types import TokenRange
from orchestrator.autoscaling.traffic import TrafficForecast

_SAMPLED = 8
"""Maximum number of prompt lengths per traffic class for which durations are predicted."""
_BITS = 7
"""Number of significant bits to which prompt lengths are rounded, which is a precision of about one percent."""


@dataclass(frozen=True)
class ServiceModel:
    """Predicted durations for one group of each role, from the planner that also plans requests."""

    planner: ChainPlanner
    """Planner with step times, for chains of at least `num_ranks` ranks."""
    num_ranks: int
    num_slots: int
    _known: dict[int, tuple[float, float]] = field(default_factory=dict, compare=False, repr=False)
    """Cached results of `prompt_s` by number of tokens. They are valid for the cost model in `_costs`."""
    _costs: list[CostModel] = field(default_factory=list, compare=False, repr=False)
    """Cost model for which results are cached; empty if there is none."""

    def prompt_s(self, num_tokens: int) -> tuple[float, float]:
        """Return two durations in seconds: how long a prompt keeps its prefill group busy, and the time to its first
        token on an idle group, including the transfer of KV.

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
        return busy_s, alone_s + self.planner.push_s(num_tokens, alone_s)

    def step_s(self, rows: float, context: float) -> float:
        """Return the duration in seconds of a decode step with `rows` sequences (at least 1 is assumed) and a mean
        context of `context` tokens."""
        return self.planner.step_s(max(rows, 1.0), context)


@dataclass(frozen=True)
class Backlog:
    """Work that is waiting already."""

    prefill_s: float = 0.0
    """Seconds that one prefill group would need for all prompts that have arrived and are not computed yet."""
    num_requests: int = 0
    """Number of requests that have arrived and have no token yet, including those whose KV has not been pulled."""
    clear_s: float = 30.0
    """Seconds in which the waiting work should be done."""


NO_BACKLOG = Backlog()


class Demand:
    """Demand of a traffic forecast and a backlog on groups of each role."""

    def __init__(self, service: ServiceModel, traffic: TrafficForecast) -> None:
        self.service = service
        self.gap_scv = traffic.gap_scv
        self._traffic = traffic
        self._backlog = NO_BACKLOG
        self._factor = 1.0

    def beside(self, backlog: Backlog, factor: float = 1.0) -> "Demand":
        """Return the demand of `factor` times the traffic plus this backlog. Predictions that exist already are
        reused."""
        made = Demand(self.service, self._traffic)
        made._backlog, made._factor = backlog, factor
        made._sampled, made._tokens = self._sampled, self._tokens
        return made

    @cached_property
    def rate(self) -> float:
        """Return the number of requests per second, with the backlog as additional traffic."""
        return self._traffic_rate + self._backlog.num_requests / self._backlog.clear_s

    @cached_property
    def prefill_work(self) -> float:
        """Return the seconds of prefill per second that all prefill groups together must compute."""
        return self.prompt_s * self._traffic_rate + self._backlog.prefill_s / self._backlog.clear_s

    @cached_property
    def prompt_s(self) -> float:
        """Return the mean number of seconds for which a prompt keeps a prefill group busy."""
        return float(self.shares @ self._busy_s)

    @cached_property
    def prompt_scv(self) -> float:
        """Return the squared coefficient of variation of the seconds for which a prompt keeps a prefill group busy."""
        square = float(self.shares @ self._busy_s**2)
        return max(square / self.prompt_s**2 - 1, 0.0) if self.prompt_s else 0.0

    @cached_property
    def token_rate(self) -> float:
        """Return the number of output tokens per second, without the first token of each request."""
        return self._tokens[0] * self.rate

    @cached_property
    def context(self) -> float:
        """Return the mean number of tokens in the context of a sequence."""
        return self._tokens[1]

    @property
    def _traffic_rate(self) -> float:
        return self._factor * self._traffic.rate

    @property
    def shares(self) -> NDArray[np.float64]:
        """Return the share of requests that each sample represents, `[samples]`. The shares sum to 1."""
        return self._sampled[0]

    @property
    def alone_s(self) -> NDArray[np.float64]:
        """Return the predicted seconds to the first token on idle groups, `[samples]`."""
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
