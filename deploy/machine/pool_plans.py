"""Finds the best use of one machine's units, which are its cores or its GPUs. The alternatives are engines that also
prefill, and chains of prefill ranks with separate generation engines.

For each plan, the cost model predicts two numbers: the number of requests per second that it can serve, and the time to
first token on an idle machine. Both are for requests of one size: `PROMPT_TOKENS` prompt tokens and `OUTPUT_TOKENS`
output tokens. The advantage of engines that prefill is that their units are never idle, because they alternate between
prefill and generation. The advantage of a chain is that long prompts do not delay running streams, because generation
has its own units. All cores share the memory bandwidth. If it limits the speed of generation steps, a generation engine
with fewer cores is not slower, and a chain does not reduce the request rate. Each GPU has its own memory. A chain of
GPUs reduces the request rate, unless its share of the GPUs is close to the share of prefill in the work of a request.
The functions have no side effects.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from baton.planning.chain.search import analytic_seed
from baton.planning.chain.wavefront import chain_ttft, rank_seconds, work_of
from baton.planning.cost_model import BATON, LinkModel
from baton.planning.hardware import ModelCosts

PROMPT_TOKENS = 1024
"""Number of prompt tokens of the nominal request, with which plans are compared."""
OUTPUT_TOKENS = 128
"""Number of output tokens of the nominal request, with which plans are compared."""
MOST_RANKS = 8
"""Maximum number of prefill ranks of a chain in the plans that are compared."""
_ALIKE = 0.05
"""Fraction of the highest request rate that may be given up for a shorter time to first token. With 0.05, only plans
with at least 95 % of the highest request rate are considered."""


@dataclass(frozen=True)
class PoolPlan:
    """Division of a machine's units among workers, with the predicted request rate and time to first token for the
    nominal request."""

    num_chains: int
    """Number of prefill chains. 0: the generation engines also prefill."""
    num_ranks: int
    """Number of ranks of each chain, with one unit each."""
    num_engines: int
    engine_units: int
    """Number of units of each engine."""
    requests_per_s: float
    first_token_s: float
    unit: str = "thread"

    def __str__(self) -> str:
        chains = f"{_counted(self.num_chains, 'chain')} of {_counted(self.num_ranks, 'rank')} and "
        engines = f"{_counted(self.num_engines, 'engine')} of {_counted(self.engine_units, self.unit)}"
        how = f"{chains if self.num_chains else ''}{engines}"
        rate = float(f"{self.requests_per_s:.2g}")
        return f"{how} ({rate:g} requests a second, first token after {self.first_token_s:.2g} s)"


@dataclass(frozen=True)
class Costs:
    """Costs of one model on one machine."""

    of: Callable[[int], ModelCosts]
    """Function that returns the costs on a worker with the given number of units."""
    num_slots: int
    """Number of sequences in a generation engine's batch."""
    unit: str = "thread"
    """Noun for a unit in readable text."""
    push: LinkModel | None = None
    """Link from a prefill rank to a generation engine. None: the time of pushing KV is not predicted."""

    def together(self, num_engines: int, engine_units: int) -> PoolPlan:
        """Return the plan with engines that have all units and also prefill. The plan's request rate and time to first
        token are predicted."""
        prefill_s = float(chain_ttft([PROMPT_TOKENS], self.of(engine_units).prefill, BATON))
        request_s = prefill_s + self._generation_s(engine_units)
        return PoolPlan(0, 0, num_engines, engine_units, num_engines / request_s, prefill_s, self.unit)

    def apart(self, num_chains: int, num_ranks: int, num_engines: int, engine_units: int) -> PoolPlan:
        """Return the plan with chains of `num_ranks` prefill ranks, which have one unit each, and generation engines.
        The plan's request rate and time to first token are predicted."""
        cost = replace(self.of(1).prefill, push=self.push)
        chunks = np.array([analytic_seed(PROMPT_TOKENS, num_ranks, cost, BATON.kernel)], dtype=np.float64)
        is_last = np.arange(num_ranks) == num_ranks - 1
        busy_s = float(rank_seconds(work_of(chunks, cost, BATON, 0), is_last, cost, BATON).max()) + cost.head_s
        if cost.push is not None:
            busy_s = max(busy_s, float(chunks.max()) * cost.num_layers * cost.kv_bytes / cost.push.bandwidth)
        rate = min(num_chains / busy_s, num_engines / self._generation_s(engine_units))
        first_token_s = float(chain_ttft(chunks, cost, BATON)[0])
        return PoolPlan(num_chains, num_ranks, num_engines, engine_units, rate, first_token_s, self.unit)

    def _generation_s(self, engine_units: int) -> float:
        """Return the seconds of an engine's time that one nominal answer costs, if it is generated in a full batch."""
        step_s = self.of(engine_units).step.plain_s(self.num_slots, PROMPT_TOKENS + OUTPUT_TOKENS / 2)
        return OUTPUT_TOKENS * step_s / self.num_slots


def core_plans(costs: Costs, num_cores: int, most_workers: int) -> list[PoolPlan]:
    """Return all plans that divide `num_cores` cores among at most `most_workers` workers. The first plan is one engine
    that also prefills. The others have a chain of 1, 2, ... prefill ranks."""
    most_ranks = min(num_cores - 1, most_workers - 1, MOST_RANKS)
    apart = [costs.apart(1, num_ranks, 1, num_cores - num_ranks) for num_ranks in range(1, most_ranks + 1)]
    return [costs.together(1, num_cores), *apart]


def gpu_plans(costs: Costs, num_gpus: int) -> list[PoolPlan]:
    """Return all plans that use `num_gpus` GPUs, one for each worker. In the first plan, all workers are engines that
    also prefill. The others have chains of equal length."""
    lengths = range(1, min(num_gpus - 1, MOST_RANKS) + 1)
    chains = [(number, each) for each in lengths for number in range(1, (num_gpus - 1) // each + 1)]
    apart = [costs.apart(number, each, num_gpus - number * each, 1) for number, each in chains]
    return [costs.together(num_gpus, 1), *apart]


def best_plan(found: Sequence[PoolPlan]) -> PoolPlan:
    """Return the plan with the shortest time to first token, of all plans whose request rate is high enough: at least
    (1 - `_ALIKE`) times the highest request rate of all plans. If several of these plans have the same time to first
    token, the first one is returned."""
    most = max(plan.requests_per_s for plan in found)
    near = [plan for plan in found if plan.requests_per_s >= (1 - _ALIKE) * most]
    return min(near, key=lambda plan: plan.first_token_s)


def reason_for(chosen: PoolPlan, found: Sequence[PoolPlan]) -> str:
    """Return readable text that compares the chosen plan with the best plan of the other kind, with or without
    chains."""
    others = [plan for plan in found if bool(plan.num_chains) != bool(chosen.num_chains)]
    return f"{chosen}{f', rather than {best_plan(others)}' if others else ''}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number > 1 else ''}"
