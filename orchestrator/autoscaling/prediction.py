"""Predicts the latencies of an allocation of groups for a forecast of traffic, by the cost model and queueing theory.

    first token    wait for a slot + wait for a prefill group + the prompt's own prefill + transfer + half a step
    next tokens    the step time at the rows at which batches settle, and at the 95th percentile of their number

The waits are those of `baton.planning.queueing`, for the distributions in `orchestrator.autoscaling.demand`.
Percentiles count the work that waits already. Beyond saturation percentiles do not exist. There the share of requests
that meet their targets is a rule of thumb that falls with the overload, so that allocations can still be compared. That
share is the mean of two, with the waiting work and without it, so that an allocation that clears a queue and then fails
the traffic is not preferred. Pure.
"""

import copy
import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from baton.planning.queueing import NO_WAIT, Wait, poisson_p95, settled_rows, wait_for_servers
from orchestrator.autoscaling.demand import NO_BACKLOG, Backlog, Demand, ServiceModel
from orchestrator.autoscaling.traffic import TrafficForecast
from orchestrator.requests.config import AutoscalingConfig

_SATURATED = 0.98
"""Utilisation up to which waits are predicted."""
_OVERLOAD_POWER = 8.0
"""Power of capacity by demand with which good requests become fewer in an overload."""


@dataclass(frozen=True, order=True)
class Allocation:
    """Numbers of groups of both roles."""

    num_prefill: int
    num_generate: int
    num_lent: int = 0
    """Number of ranks of prefill groups that serve as generation groups, and count there, while their chains continue
    without them."""

    @property
    def total(self) -> int:
        """Return the number of groups that are paid for."""
        return self.num_prefill + self.num_generate - self.num_lent

    def __str__(self) -> str:
        lent = f" ({self.num_lent} lent)" if self.num_lent else ""
        return f"{self.num_prefill}:{self.num_generate}{lent}"


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
    """Slots in use, by prompts that are prefilled as well, as a part of all slots; above 1, requests pile up."""

    def meets(self, config: AutoscalingConfig) -> bool:
        """Return whether both percentiles are within their targets."""
        return self.ttft_p95_s <= config.ttft_p95_s and self.itl_p95_s <= config.itl_p95_s

    def __str__(self) -> str:
        return (
            f"{self.allocation} ttft_p95 {self.ttft_p95_s:.3g} s, itl_p95 {self.itl_p95_s:.3g} s, "
            f"good {self.good_share:.0%}, prefill load {self.prefill_load:.2f}, slots {self.generation_load:.2f}"
        )


@dataclass(frozen=True)
class _Batches:
    """The state at which the batches of generation groups settle."""

    step_s: float
    """Seconds of a step at the mean number of rows."""
    late_step_s: float
    """Seconds of a step at the 95th percentile of the number of rows."""
    load: float
    """Rows as a part of the slots; above 1, the tokens that are asked for exceed what full batches make."""


class Predictor:
    """Predicts allocations for one forecast and one backlog; keeps what it has predicted."""

    def __init__(
        self, service: ServiceModel, traffic: TrafficForecast, config: AutoscalingConfig, backlog: Backlog = NO_BACKLOG
    ) -> None:
        self._config = config
        self._backlog = backlog
        self._steady = Demand(service, traffic)
        self._loaded = self._steady.beside(backlog)
        self._known: dict[Allocation, Prediction] = {}

    def busier(self, factor: float) -> "Predictor":
        """Return a predictor for `factor` times as much traffic and the same backlog."""
        made = copy.copy(self)
        made._steady, made._known = self._steady.beside(NO_BACKLOG, factor), {}
        made._loaded = self._steady.beside(self._backlog, factor)
        return made

    def predict(self, allocation: Allocation) -> Prediction:
        """Return the prediction for an allocation of at least one group of each role."""
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
    """Return the wait for one of the groups, which take `slowness` times as long as whole ones."""
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
    """Return the part of all slots that is in use. A request holds a slot from its placement to its last token; while
    it waits for its prefill a slot is held, but does not limit what is served."""
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
    """Return the share of requests that wait for a slot and a prefill group, and are prefilled in `alone_s` [samples]
    seconds, within `seconds`."""
    if not len(alone_s):
        return 1.0
    left_s = seconds - alone_s
    tails = np.zeros_like(left_s)
    if prefill_wait.mean_s > 0:
        falls = prefill_wait.probability / prefill_wait.mean_s
        tails = prefill_wait.probability * np.exp(-np.maximum(left_s, 0.0) * falls)
    share = float(demand.shares @ np.where(left_s >= 0, 1 - tails, 0.0))
    return share * (1 - slot_wait.tail(seconds - float(demand.shares @ alone_s)))
