"""Finds the best use of one machine's units, which are its cores or its GPUs. The alternatives are engines that also
prefill, and chains of prefill ranks with separate generation engines.

For each plan, the cost model predicts the number of requests per second that it can serve, and two times on an idle
machine: until the first token, and for the answer after it. They are for requests of one size: `PROMPT_TOKENS` prompt
tokens and `OUTPUT_TOKENS` output tokens. The advantage of engines that prefill is that their units are never idle,
because they alternate between prefill and generation. The advantage of a chain is that long prompts do not delay
running streams, because generation has its own units. All cores of a NUMA node share its memory bandwidth. If it limits
the speed of generation steps, a generation engine with fewer cores is not slower, and a chain does not reduce the
request rate. Each GPU has its own memory. A chain of GPUs reduces the request rate, unless its share of the GPUs is
close to the share of prefill in the work of a request. The functions have no side effects.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from baton.planning.chain.search import analytic_seed
from baton.planning.chain.wavefront import chain_ttft, rank_seconds, work_of
from baton.planning.cost_model import BATON, CostModel, LinkModel
from baton.planning.hardware import ModelCosts

PROMPT_TOKENS = 1024
"""Number of prompt tokens of the nominal request, with which plans are compared."""
SEQUENCE_TOKENS = 2048
"""Mean number of tokens of a sequence for which the KV memory of a slot is planned."""
OUTPUT_TOKENS = 128
"""Number of output tokens of the nominal request, with which plans are compared."""
MOST_RANKS = 8
"""Maximum number of prefill ranks of a chain in the plans that are compared."""
_MOST_ENGINES = 8
"""Maximum number of engines on a NUMA node in the plans that are compared."""
_ENGINE_THREADS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64)
"""Numbers of threads of an engine next to a chain in the plans that are compared. The ranks have the other cores."""
_ALIKE = 0.05
"""Fraction of the highest request rate that may be given up for a shorter time of a request. With 0.05, only plans with
at least 95 % of the highest request rate are considered."""


@dataclass(frozen=True)
class PoolPlan:
    """Division of a machine's units among workers, with the predicted request rate and time to first token for the
    nominal request."""

    num_chains: int
    """Number of prefill chains. 0: the generation engines also prefill."""
    num_ranks: int
    """Number of ranks of each chain."""
    num_engines: int
    engine_units: int
    """Number of units of each engine."""
    requests_per_s: float
    first_token_s: float
    unit: str = "thread"
    rank_units: int = 1
    """Number of units of each rank."""
    answer_s: float = 0.0
    """Seconds in which an engine generates the answer to one request, if it has no others and its share of memory
    bandwidth."""
    num_nodes: int = 1
    """Number of NUMA nodes that the plan uses. Each of them has the same number of ranks and of engines. If the plan
    has only one worker, the worker uses all of them."""

    @property
    def num_workers(self) -> int:
        """Total number of ranks and engines."""
        return self.num_chains * self.num_ranks + self.num_engines

    def __str__(self) -> str:
        ranks = _counted(self.num_ranks, "rank")
        if self.rank_units > 1:
            ranks = f"{ranks} of {_counted(self.rank_units, self.unit)}"
        engines = f"{_counted(self.num_engines, 'engine')} of {_counted(self.engine_units, self.unit)}"
        how = f"{_counted(self.num_chains, 'chain')} of {ranks} and {engines}" if self.num_chains else engines
        rate = float(f"{self.requests_per_s:.2g}")
        return f"{how} ({rate:g} requests a second, first token after {self.first_token_s:.2g} s)"


@dataclass(frozen=True)
class Costs:
    """Costs of one model on one machine."""

    of: Callable[[int, float], ModelCosts]
    """Function that returns the costs on a worker with the given number of units. Its second argument is the fraction
    of the machine's memory bandwidth that the worker may use at most."""
    num_slots: int
    """Number of sequences in a generation engine's batch."""
    unit: str = "thread"
    """Noun for a unit in readable text."""
    push: LinkModel | None = None
    """Link from a prefill rank to a generation engine. None: the time of pushing KV is not predicted."""

    def together(self, num_engines: int, engine_units: int, *, num_nodes: int = 1, part: float = 1.0) -> PoolPlan:
        """Return the plan with engines that have all units and also prefill. The plan's request rate and time to first
        token are predicted. `part`: fraction of the machine's memory bandwidth for each engine."""
        _, prefill_s = _chain_seconds(self.of(engine_units, part).prefill, 1)
        rate = num_engines / (prefill_s + self._answer_s(engine_units, part, self.num_slots))
        answer_s = self._answer_s(engine_units, part, 1)
        sizes = 0, 0, num_engines, engine_units
        return PoolPlan(*sizes, rate, prefill_s, self.unit, answer_s=answer_s, num_nodes=num_nodes)

    def apart(
        self,
        num_chains: int,
        num_ranks: int,
        num_engines: int,
        engine_units: int,
        *,
        rank_units: int = 1,
        num_nodes: int = 1,
        part: float = 1.0,
    ) -> PoolPlan:
        """Return the plan with chains of `num_ranks` prefill ranks, which have `rank_units` units each, and generation
        engines. The plan's request rate and time to first token are predicted. `part`: fraction of the machine's memory
        bandwidth for each engine."""
        busy_s, first_token_s = _chain_seconds(replace(self.of(rank_units, part).prefill, push=self.push), num_ranks)
        rate = min(num_chains / busy_s, num_engines / self._answer_s(engine_units, part, self.num_slots))
        answer_s = self._answer_s(engine_units, part, 1)
        sizes = num_chains, num_ranks, num_engines, engine_units
        return PoolPlan(*sizes, rate, first_token_s, self.unit, rank_units, answer_s, num_nodes)

    def _answer_s(self, engine_units: int, part: float, batch: int) -> float:
        """Return the seconds of an engine's time that one nominal answer costs, if `batch` answers are generated
        together."""
        step_s = self.of(engine_units, part).step.plain_s(batch, PROMPT_TOKENS + OUTPUT_TOKENS / 2)
        return OUTPUT_TOKENS * step_s / batch


@lru_cache(maxsize=1024)
def _chain_seconds(cost: CostModel, num_ranks: int) -> tuple[float, float]:
    """Return two times in seconds for the nominal prompt on a chain: the time that it keeps the busiest rank or link
    busy, and the time to first token on an idle chain."""
    chunks = np.array([analytic_seed(PROMPT_TOKENS, num_ranks, cost, BATON.kernel)], dtype=np.float64)
    is_last = np.arange(num_ranks) == num_ranks - 1
    busy_s = float(rank_seconds(work_of(chunks, cost, BATON, 0), is_last, cost, BATON).max()) + cost.head_s
    if cost.push is not None:
        busy_s = max(busy_s, float(chunks.max()) * cost.num_layers * cost.kv_bytes / cost.push.bandwidth)
    return busy_s, float(chain_ttft(chunks, cost, BATON)[0])


def core_plans(costs: Costs, node_cores: Sequence[int], fits: Callable[[PoolPlan], bool]) -> list[PoolPlan]:
    """Return the plans that divide a machine's cores among workers. `node_cores`: number of cores of each NUMA node, in
    descending order. `fits`: function that returns True if memory suffices for a plan.

    The first plan is one engine on all cores, which also prefills. If it uses several nodes, it has the memory
    bandwidth of only one, because a worker's weights are where the thread that loaded them runs. The other plans are
    those that fit, with workers that use one node each. A plan uses the first 1, 2, ... nodes. On each node it has
    engines that also prefill, or engines and prefill ranks. The ranks of one or several nodes form a chain.
    """
    part = 1 / len(node_cores)
    whole = costs.together(1, sum(node_cores), num_nodes=len(node_cores), part=part)
    others = (
        plan
        for num_nodes, num_cores in enumerate(node_cores, 1)
        for plan in _plans_on_nodes(costs, num_nodes, num_cores, part)
    )
    return [whole, *(plan for plan in others if plan != whole and fits(plan))]


def _plans_on_nodes(costs: Costs, num_nodes: int, num_cores: int, part: float) -> Iterator[PoolPlan]:
    """Yield the plans that use `num_cores` cores on each of `num_nodes` nodes. `part`: fraction of the machine's memory
    bandwidth that a node has."""
    for each in range(1, min(num_cores, _MOST_ENGINES) + 1):
        yield costs.together(num_nodes * each, num_cores // each, num_nodes=num_nodes, part=part / each)
    groupings = [number for number in range(1, num_nodes + 1) if num_nodes % number == 0]
    for engines in range(1, min(num_cores, _MOST_ENGINES) + 1):
        for threads in (each for each in _ENGINE_THREADS if engines * each < num_cores):
            left = num_cores - engines * threads
            for ranks in (number for number in range(1, min(left, MOST_RANKS) + 1) if left % number == 0):
                yield from (
                    costs.apart(
                        *(num_chains, ranks * num_nodes // num_chains, num_nodes * engines, threads),
                        rank_units=left // ranks,
                        num_nodes=num_nodes,
                        part=part / engines,
                    )
                    for num_chains in groupings
                    if ranks * num_nodes <= MOST_RANKS * num_chains
                )


def gpu_plans(costs: Costs, num_gpus: int) -> list[PoolPlan]:
    """Return all plans that use `num_gpus` GPUs, one for each worker. In the first plan, all workers are engines that
    also prefill. The others have chains of equal length."""
    lengths = range(1, min(num_gpus - 1, MOST_RANKS) + 1)
    chains = [(number, each) for each in lengths for number in range(1, (num_gpus - 1) // each + 1)]
    apart = [costs.apart(number, each, num_gpus - number * each, 1) for number, each in chains]
    return [costs.together(num_gpus, 1), *apart]


def best_plan(found: Sequence[PoolPlan]) -> PoolPlan:
    """Return the plan with which a request on an idle machine ends soonest, of all plans whose request rate is high
    enough: at least (1 - `_ALIKE`) times the highest request rate of all plans. If several of these plans have the same
    time, the first one is returned."""
    most = max(plan.requests_per_s for plan in found)
    near = [plan for plan in found if plan.requests_per_s >= (1 - _ALIKE) * most]
    return min(near, key=lambda plan: plan.first_token_s + plan.answer_s)


def reason_for(chosen: PoolPlan, found: Sequence[PoolPlan]) -> str:
    """Return readable text that compares the chosen plan with the best plan of the other kind, with or without
    chains."""
    others = [plan for plan in found if bool(plan.num_chains) != bool(chosen.num_chains)]
    return f"{chosen}{f', rather than {best_plan(others)}' if others else ''}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number > 1 else ''}"
