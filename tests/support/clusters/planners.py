"""Planners whose predictions can be computed by hand."""

import functools
from collections.abc import Hashable, Sequence
from dataclasses import replace

from baton.planning.cost_model import CostModel
from baton.planning.hardware import ModelCosts
from baton.planning.local_prefill import LocalPrefill
from baton.planning.model_shape import ModelShape
from baton.planning.planner import ChainPlanner
from baton.planning.prefill_costs import PrefillCosts
from baton.planning.work_cost import WorkCost
from baton.results.prefill_trace import RankTiming
from baton_lab.study.known_hardware import hardware_of
from baton_lab.study.known_models import shape_of
from baton_lab.traffic.service import RecallingPlanner

_SHAPE = ModelShape(num_layers=1, hidden=4, num_heads=1, num_kv_heads=1, head_dim=4, ffn=4, vocab=4)

_LINEAR = CostModel(num_layers=10, linear_s=1e-4, pair_s=0.0, kv_bytes=0, project_share=0.0)

STEP = WorkCost(0.02, 0.0, 0.0, 0.0)
"""Cost of steps that take 20 ms, unless another one is given."""


class FixedPlanner(ChainPlanner):
    """Planner that keeps its nominal costs of prefill: actual durations of jobs do not change them."""

    def observe(self, group: Hashable, ranks: Sequence[RankTiming]) -> None:
        super().observe(group, ranks)
        self._rank_costs, self._send_factor = PrefillCosts(self.nominal.prefill), 1.0


def planner_of(
    cost: CostModel,
    *,
    max_ranks: int = 4,
    max_tokens: int = 8192,
    step: WorkCost = STEP,
    local: LocalPrefill | None = None,
) -> ChainPlanner:
    """Return a planner that predicts by these costs alone."""
    table = _searched(cost, max_ranks, max_tokens).table
    costs = costs_of(cost, step)
    return FixedPlanner(costs, max_ranks=max_ranks, max_tokens=max_tokens, local=local, table=table)


@functools.cache
def _searched(cost: CostModel, max_ranks: int, max_tokens: int) -> ChainPlanner:
    """Return a planner whose table of plans is shared by all planners with the same cost model and limits. Computing
    the table takes up to a second."""
    return ChainPlanner(costs_of(cost), max_ranks=max_ranks, max_tokens=max_tokens)


def times(cost: CostModel, factor: float) -> CostModel:
    """Return a copy in which all times, including those of links, are multiplied by `factor`."""
    names = ("linear_s", "pair_s", "fixed_s", "issue_s", "head_s", "copy_s")
    slower = {name: factor * getattr(cost, name) for name in names}
    return replace(cost, link=cost.link.times(factor), **slower)


def costs_of(cost: CostModel, step: WorkCost = STEP) -> ModelCosts:
    """Return these costs of prefill and of steps, for a tiny model with as many layers as `cost` has."""
    return ModelCosts(replace(_SHAPE, num_layers=cost.num_layers), cost, step, 2.0)


@functools.cache
def linear_planner() -> ChainPlanner:
    """Return a planner for which a layer takes 0.1 ms per token on every rank, and nothing else takes time. More ranks
    are always faster."""
    return planner_of(_LINEAR)


def deciding_planner(speed: float = 1.0, *, max_ranks: int = 1, slower: float = 1.0) -> ChainPlanner:
    """Return a planner that decides between disaggregated and local prefill. Ranks take 0.1 ms * `slower` per token and
    layer. The generation group prefills at `speed` times the speed of a rank. Its steps take 20 ms without prefill, and
    at most twice as long with prefill."""
    return planner_of(times(_LINEAR, slower), max_ranks=max_ranks, local=LocalPrefill(speed, 256))


def traffic_planner(hardware: str, max_ranks: int = 1) -> RecallingPlanner:
    """Return a planner for simulated traffic of Llama 3.1 8B on the given hardware."""
    costs = ModelCosts.of(shape_of("llama-3.1-8b"), hardware_of(hardware))
    return RecallingPlanner(costs, max_ranks=max_ranks, max_tokens=8192)
