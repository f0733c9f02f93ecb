"""Finds the best use of one machine's cores. The alternatives are one engine that also prefills, and a chain of prefill
ranks with a separate generation engine.

For each plan, the cost model predicts two numbers: the number of requests per second that it can serve, and the time to
first token on an idle machine. Both are for requests of one size: `PROMPT_TOKENS` prompt tokens and `OUTPUT_TOKENS`
output tokens. The advantage of one engine is that its cores are never idle, because they alternate between prefill and
generation. The advantage of a chain is that long prompts do not delay running streams, because generation has its own
cores. All cores share the memory bandwidth. If it limits the speed of generation steps, a generation engine with fewer
cores is not slower, and a chain does not reduce the request rate. The functions have no side effects.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from baton.planning.calibration import Calibration
from baton.planning.chain.search import analytic_seed
from baton.planning.chain.wavefront import chain_ttft, rank_seconds, work_of
from baton.planning.cost_model import BATON
from baton.planning.step_times import StepTimes

PROMPT_TOKENS = 1024
"""Number of prompt tokens of the nominal request, with which plans are compared."""
OUTPUT_TOKENS = 128
"""Number of output tokens of the nominal request, with which plans are compared."""
MOST_RANKS = 8
"""Maximum number of prefill ranks in the plans that are compared."""
_ALIKE = 0.05
"""Fraction of the highest request rate that may be given up for a shorter time to first token. With 0.05, only plans
with at least 95 % of the highest request rate are considered."""


@dataclass(frozen=True)
class CorePlan:
    """Division of a machine's cores among workers, with the predicted request rate and time to first token for the
    nominal request."""

    num_ranks: int
    """Number of prefill ranks, with one thread each. 0: the plan has no prefill ranks, and the generation engine also
    prefills."""
    engine_threads: int
    requests_per_s: float
    first_token_s: float

    def __str__(self) -> str:
        threads = f"{self.engine_threads} thread{'s' if self.engine_threads > 1 else ''}"
        ranks = f"{self.num_ranks} rank{'s' if self.num_ranks > 1 else ''}"
        how = f"a chain of {ranks} and an engine of {threads}" if self.num_ranks else f"one engine of {threads}"
        return f"{how} ({self.requests_per_s:.2g} requests a second, first token after {self.first_token_s:.2g} s)"


@dataclass(frozen=True)
class Costs:
    """Prefill costs and step times of one model on one machine. Each is a function of the number of threads of a
    worker."""

    prefill: Callable[[int], Calibration]
    steps: Callable[[int], StepTimes]
    num_slots: int
    """Number of sequences in the generation engine's batch."""

    def together(self, num_cores: int) -> CorePlan:
        """Return the plan with one engine that has all cores and also prefills. The plan's request rate and time to
        first token are predicted."""
        prefill_s = float(chain_ttft([PROMPT_TOKENS], self.prefill(num_cores).cost, BATON))
        request_s = prefill_s + self._generation_s(num_cores)
        return CorePlan(0, num_cores, 1 / request_s, prefill_s)

    def apart(self, num_cores: int, num_ranks: int) -> CorePlan:
        """Return the plan with a chain of `num_ranks` prefill ranks, which have one core each, and a generation engine,
        which has the remaining cores. The plan's request rate and time to first token are predicted."""
        cost, num_threads = self.prefill(1).cost, num_cores - num_ranks
        chunks = np.array([analytic_seed(PROMPT_TOKENS, num_ranks, cost, BATON.kernel)], dtype=np.float64)
        is_last = np.arange(num_ranks) == num_ranks - 1
        busy_s = float(rank_seconds(work_of(chunks, cost, BATON, 0), is_last, cost, BATON).max()) + cost.head_s
        request_s = max(busy_s, self._generation_s(num_threads))
        return CorePlan(num_ranks, num_threads, 1 / request_s, float(chain_ttft(chunks, cost, BATON)[0]))

    def _generation_s(self, num_threads: int) -> float:
        """Return the seconds of an engine's time that one nominal answer costs, if it is generated in a full batch."""
        step_s = self.steps(num_threads).step_s(self.num_slots, PROMPT_TOKENS + OUTPUT_TOKENS / 2)
        return OUTPUT_TOKENS * step_s / self.num_slots


def core_plans(costs: Costs, num_cores: int, most_workers: int) -> list[CorePlan]:
    """Return all plans that divide `num_cores` cores among at most `most_workers` workers. The first plan is one engine
    that also prefills. The others have a chain of 1, 2, ... prefill ranks."""
    most_ranks = min(num_cores - 1, most_workers - 1, MOST_RANKS)
    return [costs.together(num_cores), *(costs.apart(num_cores, each) for each in range(1, most_ranks + 1))]


def best_core_plan(found: Sequence[CorePlan]) -> CorePlan:
    """Return the plan with the shortest time to first token, of all plans whose request rate is high enough: at least
    (1 - `_ALIKE`) times the highest request rate of all plans. If several of these plans have the same time to first
    token, the first one is returned."""
    most = max(plan.requests_per_s for plan in found)
    near = [plan for plan in found if plan.requests_per_s >= (1 - _ALIKE) * most]
    return min(near, key=lambda plan: plan.first_token_s)
