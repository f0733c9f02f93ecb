"""Predicts the latencies of an allocation of groups for forecast traffic, from the cost model and queueing theory.

    time to first token    wait for a slot + wait for a prefill group + the prompt's own prefill + transfer
                           + half a step
    inter-token latency    step time at the mean batch size, and at the 95th percentile of the batch size

`orchestrator.autoscaling.queueing` computes the waits from the distributions in `orchestrator.autoscaling.demand`.
Percentiles include the work that is already waiting.

If groups are saturated, percentiles do not exist. The share of requests that meet the targets is then estimated by a
heuristic: the share decreases with the overload. This keeps saturated allocations comparable. If requests are waiting,
the share is the mean of two estimates: one for the traffic with the waiting work, and one for the traffic alone.
Therefore an allocation that clears the queue but cannot sustain the traffic is not preferred. Does no I/O.
"""

import copy
import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from orchestrator.autoscaling.demand import NO_BACKLOG, Backlog, Demand, ServiceModel
from orchestrator.autoscaling.queueing import NO_WAIT, Wait, poisson_p95, settled_rows, wait_for_servers
from orchestrator.autoscaling.traffic import TrafficForecast
from orchestrator.requests.config import AutoscalingConfig

_SATURATED = 0.98
"""Maximum utilisation for which waits are predicted. Groups with a higher utilisation count as saturated."""
_OVERLOAD_POWER = 8.0
"""Exponent of the penalty for overload. The share of requests within the targets is multiplied by (capacity / demand)
to this power."""


@dataclass(frozen=True, order=True)
class Allocation:
    """Number of prefill groups and of generation groups."""

    num_prefill: int
    num_generate: int
    num_lent: int = 0
    """Number of ranks that prefill groups have lent for generation. Each lent rank serves as a generation group of its
    own and is included in `num_generate`. The lending groups continue with fewer ranks."""

    @property
    def total(self) -> int:
        """Return the number of groups that count towards the autoscaler's limits (`min` and `max`). Groups that run on
        a lent rank are not counted, because the rank belongs to a prefill group, which is counted."""
        return self.num_prefill + self.num_generate - self.num_lent

    def __str__(self) -> str:
        lent = f" ({self.num_lent} lent)" if self.num_lent else ""
        return f"{self.num_prefill}:{self.num_generate}{lent}"


@dataclass(frozen=True)
class Prediction:
    """Predicted latencies of an allocation of groups. Latencies are infinite if the groups are saturated."""

    allocation: Allocation
    ttft_p95_s: float
    itl_p95_s: float
    good_share: float
    """Fraction of requests that meet both latency targets, from 0 to 1."""
    prefill_load: float
    """Utilisation of the prefill groups. If it is above 1, their queues grow."""
    generation_load: float
    """Ratio of slots in use to all slots. Slots that are reserved for prompts in prefill are included. Above 1, waiting
    requests accumulate."""

    def meets(self, config: AutoscalingConfig) -> bool:
        """Return True if the 95th percentiles of both latencies are within their targets."""
        return self.ttft_p95_s <= config.ttft_p95_s and self.itl_p95_s <= config.itl_p95_s

    def __str__(self) -> str:
        return (
            f"{self.allocation} ttft_p95 {self.ttft_p95_s:.3g} s, itl_p95 {self.itl_p95_s:.3g} s, "
            f"good {self.good_share:.0%}, prefill load {self.prefill_load:.2f}, slots {self.generation_load:.2f}"
        )


@dataclass(frozen=True)
class _Batches:
    """Step times and occupancy of generation groups in a steady state."""

    step_s: float
    """Duration in seconds of a step at the mean batch size."""
    late_step_s: float
    """Duration in seconds of a step at the 95th percentile of the batch size."""
    load: float
    """Ratio of running sequences to slots. Above 1, full batches generate fewer tokens per second than the traffic
    needs."""


class Predictor:
    """Predicts the latencies of allocations for one traffic forecast and one backlog of waiting work. Caches its
    predictions."""

    def __init__(
        self, service: ServiceModel, traffic: TrafficForecast, config: AutoscalingConfig, backlog: Backlog = NO_BACKLOG
    ) -> None:
        self._config = config
        self._backlog = backlog
        self._steady = Demand(service, traffic)
        self._loaded = self._steady.beside(backlog)
        self._known: dict[Allocation, Prediction] = {}

    def busier(self, factor: float) -> "Predictor":
        """Return a predictor for the same waiting work and for `factor` times the forecast traffic."""
        made = copy.copy(self)
        made._steady, made._known = self._steady.beside(NO_BACKLOG, factor), {}
        made._loaded = self._steady.beside(self._backlog, factor)
        return made

    def predict(self, allocation: Allocation) -> Prediction:
        """Return the predicted latencies of an allocation. The allocation must have at least one group of each role."""
        if allocation not in self._known:
            made = _predict(self._loaded, allocation, self._config)
            if self._backlog.num_requests:
                steady = _predict(self._steady, allocation, self._config)
                made = replace(made, good_share=(made.good_share + steady.good_share) / 2)
            self._known[allocation] = made
        return self._known[allocation]


def _predict(demand: Demand, allocation: Allocation, config: AutoscalingConfig) -> Prediction:
    slowness = 1 / (1 - allocation.num_lent / (allocation.num_prefill * demand.service.num_ranks))
    alone_s = demand.alone_s * slowness
    prefill_load = demand.prefill_work * slowness / allocation.num_prefill
    batches = _batches(demand, allocation.num_generate)
    prefill_wait = _prefill_wait(demand, allocation.num_prefill, min(prefill_load, _SATURATED), slowness)
    slot_load = max(_slot_load(demand, allocation.num_generate, batches.step_s), batches.load)
    waits = (prefill_wait, _slot_wait(demand, allocation.num_generate, min(slot_load, _SATURATED)))
    is_stable = prefill_load <= _SATURATED and slot_load <= _SATURATED
    ttft_s = _ttft_p95_s(demand, alone_s, *waits) + batches.step_s / 2 if is_stable else math.inf
    share = _share_within(config.ttft_p95_s - batches.step_s / 2, demand, alone_s, *waits)
    for overload in (prefill_load / _SATURATED, slot_load / _SATURATED, batches.late_step_s / config.itl_p95_s):
        share *= max(overload, 1.0) ** -_OVERLOAD_POWER
    itl_s = batches.late_step_s if batches.load <= 1 else math.inf
    return Prediction(allocation, ttft_s, itl_s, share, prefill_load, slot_load)


def _prefill_wait(demand: Demand, num_groups: int, load: float, slowness: float) -> Wait:
    """Return the wait for one of the prefill groups, whose prefills take `slowness` times as long as with all their
    ranks."""
    if not demand.prompt_s:
        return NO_WAIT
    prompt_s = demand.prompt_s * slowness
    rate = load * num_groups / prompt_s
    wait = wait_for_servers(num_groups, rate, prompt_s, service_scv=demand.prompt_scv, gap_scv=demand.gap_scv)
    assert wait is not None
    return wait


def _batches(demand: Demand, num_groups: int) -> _Batches:
    num_slots, token_rate = demand.service.num_slots, demand.token_rate / num_groups

    def step_s(rows: float) -> float:
        return demand.service.step_s(rows, demand.context)

    rows = settled_rows(token_rate, step_s, num_slots)
    if rows is None:
        full_s = step_s(num_slots)
        return _Batches(full_s, full_s, token_rate * full_s / num_slots)
    most = min(poisson_p95(rows * num_groups) / num_groups, num_slots)
    return _Batches(step_s(rows), step_s(most), rows / num_slots)


def _slot_load(demand: Demand, num_groups: int, step_s: float) -> float:
    """Return the ratio of used slots to all slots.

    A request holds a slot from its placement to its last token. The time for which it waits for a prefill group is not
    counted, because it does not limit the throughput.
    """
    num_held = demand.rate * float(demand.shares @ demand.alone_s) + demand.token_rate * step_s
    return num_held / (num_groups * demand.service.num_slots)


def _slot_wait(demand: Demand, num_groups: int, load: float) -> Wait:
    if demand.rate <= 0:
        return NO_WAIT
    num_slots = num_groups * demand.service.num_slots
    wait = wait_for_servers(num_slots, demand.rate, load * num_slots / demand.rate)
    assert wait is not None
    return wait


def _ttft_p95_s(demand: Demand, alone_s: NDArray[np.float64], prefill_wait: Wait, slot_wait: Wait) -> float:
    if not len(alone_s):
        return 0.0
    high = float(alone_s.max()) + prefill_wait.percentile(99) + slot_wait.percentile(99) + 1e-6
    low = 0.0
    for _ in range(20):
        middle = (low + high) / 2
        is_enough = _share_within(middle, demand, alone_s, prefill_wait, slot_wait) >= 0.95
        low, high = (low, middle) if is_enough else (middle, high)
    return high


def _share_within(
    seconds: float, demand: Demand, alone_s: NDArray[np.float64], prefill_wait: Wait, slot_wait: Wait
) -> float:
    """Return the share of requests whose time to first token is at most `seconds`: the wait for a slot, the wait for a
    prefill group, and the prefill itself, which takes `alone_s` [samples] seconds."""
    if not len(alone_s):
        return 1.0
    left_s = seconds - alone_s
    tails = np.zeros_like(left_s)
    if prefill_wait.mean_s > 0:
        falls = prefill_wait.probability / prefill_wait.mean_s
        tails = prefill_wait.probability * np.exp(-np.maximum(left_s, 0.0) * falls)
    share = float(demand.shares @ np.where(left_s >= 0, 1 - tails, 0.0))
    return share * (1 - slot_wait.tail(seconds - float(demand.shares @ alone_s)))
