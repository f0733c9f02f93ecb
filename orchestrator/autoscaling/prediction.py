"""Predicts the latencies of an allocation of groups for a forecast of traffic, by the cost model and queueing theory.

    first token    wait for a slot + wait for a prefill group + the prompt's own prefill + transfer + half a step
    next tokens    the step time at the rows at which batches settle, and at the 95th percentile of their number

The waits are those of `planning.queueing`, for the distribution of prompts' own times, which the production planner
predicts. Work that waits already, un-pulled KV included, counts as further traffic over the seconds in which it should
be gone. Beyond saturation there are no percentiles; there, the share of requests that meet their targets is a rule of
thumb that falls with the overload, so that allocations can still be compared. Pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from baton.types import TokenRange
from orchestrator.autoscaling.config import AutoscalingConfig
from orchestrator.autoscaling.traffic import TrafficForecast
from planning.planner import ChainPlanner
from planning.queueing import Wait, poisson_percentile, settled_rows, wait_for_servers

_SATURATED = 0.98
"""Utilisation up to which waits are predicted."""
_OVERLOAD_POWER = 3.0
_SAMPLED = 16
"""Prompt lengths of a class that are predicted."""


@dataclass(frozen=True, order=True)
class Allocation:
    """Numbers of groups of both roles."""

    num_prefill: int
    num_generate: int

    @property
    def total(self) -> int:
        """Return the number of groups."""
        return self.num_prefill + self.num_generate

    def __str__(self) -> str:
        return f"{self.num_prefill}:{self.num_generate}"


@dataclass(frozen=True)
class Backlog:
    """Work that waits already."""

    prefill_s: float = 0.0
    """Seconds that one prefill group would take for all prompts that have come and are not computed."""
    num_requests: int = 0
    """Requests that have come and do not generate yet, those with un-pulled KV included."""
    clear_s: float = 30.0
    """Seconds in which this work should be gone."""


@dataclass(frozen=True)
class Prediction:
    """The latencies that are predicted for an allocation. Infinite where its groups are saturated."""

    allocation: Allocation
    ttft_p95_s: float
    itl_p95_s: float
    good_share: float
    """Share of requests that meet both targets."""
    prefill_load: float
    """Utilisation of the prefill groups; above 1, they fall behind."""
    generation_load: float
    """Rows at which batches settle, as a part of the slots; above 1, requests pile up."""

    def meets(self, config: AutoscalingConfig) -> bool:
        """Return whether both percentiles are within their targets."""
        return self.ttft_p95_s <= config.ttft_p95_s and self.itl_p95_s <= config.itl_p95_s

    def __str__(self) -> str:
        return (
            f"{self.allocation} ttft_p95 {self.ttft_p95_s:.3g} s, itl_p95 {self.itl_p95_s:.3g} s, "
            f"good {self.good_share:.0%}, prefill load {self.prefill_load:.2f}, slots {self.generation_load:.2f}"
        )


@dataclass(frozen=True)
class ServiceModel:
    """What one group of each role does, by the production planner."""

    planner: ChainPlanner
    """Planner with step times, for chains of at least `num_ranks`."""
    num_ranks: int
    num_slots: int

    def prompt_s(self, num_tokens: int) -> tuple[float, float]:
        """Return the seconds for which a prompt keeps its group busy, and its seconds to a first token there alone,
        transfer included."""
        chunks = self.planner.chunks(TokenRange(0, num_tokens), self.num_ranks)
        alone_s = self.planner.ttft_s(chunks)
        busy_s = sum(self.planner.rank_s(chunks)) / self.num_ranks
        return busy_s, alone_s + self.planner.push_s(num_tokens, alone_s)


@dataclass(frozen=True)
class _Pool:
    """What a number of groups of one role means for latencies."""

    load: float
    wait: Wait
    kept: float
    """Factor on the share of good requests beyond saturation; 1 below."""


class Predictor:
    """Predicts allocations for one forecast and one backlog; keeps what it has predicted."""

    def __init__(
        self, service: ServiceModel, traffic: TrafficForecast, config: AutoscalingConfig, backlog: Backlog | None = None
    ) -> None:
        self._service = service
        self._traffic = traffic
        self._config = config
        self._backlog = backlog or Backlog()
        self._known: dict[Allocation, Prediction] = {}

    def predict(self, allocation: Allocation) -> Prediction:
        """Return the prediction for an allocation of at least one group of each role."""
        if allocation not in self._known:
            self._known[allocation] = self._predict(allocation)
        return self._known[allocation]

    @cached_property
    def _sampled(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Return weights, busy seconds and seconds alone of prompts, `[samples]` each; the weights sum to the rate."""
        weights: list[float] = []
        times: list[tuple[float, float]] = []
        for each in self._traffic.classes:
            lengths = _spread(each.prompts)
            weights += [each.rate / len(lengths)] * len(lengths)
            times += [self._service.prompt_s(length) for length in lengths]
        busy_s, alone_s = np.array(times, dtype=np.float64).reshape(-1, 2).T
        return np.array(weights), busy_s, alone_s

    @cached_property
    def _rate(self) -> float:
        return self._traffic.rate + self._backlog.num_requests / self._backlog.clear_s

    @cached_property
    def _work(self) -> tuple[float, float, float]:
        """Return the prefill work a second, mean seconds of a prompt, and the variation of its seconds."""
        weights, busy_s, _ = self._sampled
        rate = max(weights.sum(), 1e-9)
        mean_s = float(weights @ busy_s / rate) if len(busy_s) else 0.0
        square = float(weights @ busy_s**2 / rate) if len(busy_s) else 0.0
        scv = square / mean_s**2 - 1 if mean_s else 0.0
        return float(weights @ busy_s) + self._backlog.prefill_s / self._backlog.clear_s, mean_s, max(scv, 0.0)

    @cached_property
    def _generation(self) -> tuple[float, float]:
        """Return the tokens a second that are asked for, beyond first ones, and the mean context of a row."""
        tokens = keys = 0.0
        for each in self._traffic.classes:
            outputs = np.array(each.outputs, dtype=np.float64) - 1
            prompt = sum(each.prompts) / len(each.prompts)
            tokens += each.rate * float(outputs.mean())
            keys += each.rate * float((outputs * (prompt + outputs / 2)).mean())
        context = keys / tokens if tokens else 0.0
        rate = self._traffic.rate
        per_request = tokens / rate if rate else 0.0
        return per_request * self._rate, context

    def _predict(self, allocation: Allocation) -> Prediction:
        prefill = self._prefill(allocation.num_prefill)
        rows, itl_s, load, kept = self._batches(allocation.num_generate)
        step_s = self._step_s(rows)
        slots = self._slot_wait(allocation.num_generate, prefill, step_s) if load <= 1 else Wait(1.0, math.inf)
        is_stable = prefill.kept == 1 and load <= 1
        rest_s = step_s / 2 + (slots.percentile(95) if is_stable else 0.0)
        ttft_s = self._ttft_p95_s(prefill.wait, rest_s) if is_stable else math.inf
        share = self._share_within(self._config.ttft_p95_s - rest_s, prefill.wait) * prefill.kept * kept
        share *= min((self._config.itl_p95_s / itl_s) ** _OVERLOAD_POWER, 1.0) if itl_s else 1.0
        return Prediction(allocation, ttft_s, itl_s if load <= 1 else math.inf, share, prefill.load, load)

    def _prefill(self, num_groups: int) -> _Pool:
        work, mean_s, scv = self._work
        load = work / num_groups
        used = min(load, _SATURATED)
        rate = used * num_groups / mean_s if mean_s else 0.0
        wait = wait_for_servers(num_groups, rate, mean_s, service_scv=scv, gap_scv=self._traffic.gap_scv)
        assert wait is not None
        return _Pool(load, wait, 1.0 if load <= _SATURATED else (_SATURATED / load) ** _OVERLOAD_POWER)

    def _batches(self, num_groups: int) -> tuple[float, float, float, float]:
        """Return the rows of a batch, the 95th percentile of step times, the load, and the factor on good requests."""
        token_rate, _ = self._generation
        num_slots = self._service.num_slots
        rows = settled_rows(token_rate / num_groups, self._step_s, num_slots)
        if rows is None:
            full_s = self._step_s(num_slots)
            load = token_rate / num_groups * full_s / num_slots
            return float(num_slots), full_s, load, (1 / load) ** _OVERLOAD_POWER
        most = min(poisson_percentile(rows * num_groups, 95) / num_groups, num_slots)
        return rows, self._step_s(most), rows / num_slots, 1.0

    def _step_s(self, rows: float) -> float:
        _, context = self._generation
        return self._service.planner.step_s(max(rows, 1.0), context)

    def _slot_wait(self, num_groups: int, prefill: _Pool, step_s: float) -> Wait:
        weights, _, alone_s = self._sampled
        rate = self._rate
        if rate <= 0:
            return Wait(0.0, 0.0)
        token_rate, _ = self._generation
        alone = float(weights @ alone_s / max(weights.sum(), 1e-9)) if len(weights) else 0.0
        held_s = prefill.wait.mean_s + alone + token_rate / rate * step_s
        num_slots = num_groups * self._service.num_slots
        held_s = min(held_s, _SATURATED * num_slots / rate)
        return wait_for_servers(num_slots, rate, held_s) or Wait(1.0, math.inf)

    def _ttft_p95_s(self, wait: Wait, rest_s: float) -> float:
        _, _, alone_s = self._sampled
        if not len(alone_s):
            return rest_s
        low, high = 0.0, float(alone_s.max()) + wait.percentile(99) + 1e-6
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (low, middle) if self._share_within(middle, wait) >= 0.95 else (middle, high)
        return high + rest_s

    def _share_within(self, seconds: float, wait: Wait) -> float:
        """Return the share of requests that wait and are prefilled within `seconds`."""
        weights, _, alone_s = self._sampled
        if not len(alone_s):
            return 1.0
        left_s = seconds - alone_s
        if wait.mean_s > 0:
            tails = wait.probability * np.exp(-np.maximum(left_s, 0.0) * wait.probability / wait.mean_s)
        else:
            tails = np.zeros_like(left_s)
        return float(weights @ np.where(left_s >= 0, 1 - tails, 0.0) / weights.sum())


def _spread(lengths: Sequence[int]) -> list[int]:
    """Return at most `_SAMPLED` of the lengths, evenly spaced by rank."""
    ordered = sorted(lengths)
    if len(ordered) <= _SAMPLED:
        return ordered
    return [ordered[int((place + 0.5) * len(ordered) / _SAMPLED)] for place in range(_SAMPLED)]
