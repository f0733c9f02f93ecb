"""Rates that kinds of ranks reach in practice, and costs derived from these rates and a model's FLOPs and bytes.

All predictions begin with derived costs, and are corrected by the durations of finished jobs and steps
(`baton.planning.prefill_costs`, `baton.planning.step_cost`). All functions are pure.
"""

import math
from dataclasses import dataclass, replace
from typing import Self

from baton.errors import ConfigError
from baton.planning.cost_model import CostModel, LinkModel
from baton.planning.model_shape import ModelShape
from baton.planning.work_cost import WorkCost

_MIXED_TOKENS = 16
"""Number of tokens over which the cost of reading experts is averaged, in a mixture of experts. On average,
each further token of a step adds fewer experts to read than the token before it. A cost model has only one cost per
token, so the mean over this many tokens is used."""


@dataclass(frozen=True)
class Hardware:
    """Rates of one kind of rank and its link. They are rates that are reached in practice, not those of data sheets."""

    linear_flops: float
    """FLOP/s of matrix products in a layer."""
    pair_flops: float
    """FLOP/s of the attention kernel."""
    link: LinkModel
    scores_per_s: float = math.inf
    """Maximum number of attention scores per second, where each query, key and head has one score. It limits the speed
    of kernels that store all scores in memory. Infinity: no such limit."""
    memory_bandwidth: float = math.inf
    """Bytes per second of memory copies. Infinity: copies take no time."""
    fixed_s: float = 0.0
    """Seconds of a layer in addition to its products and its attention."""
    issue_s: float = 0.0
    """Minimum time in seconds of a layer of a prefill, in which its kernels are launched."""

    def __post_init__(self) -> None:
        for name in ("linear_flops", "pair_flops", "scores_per_s", "memory_bandwidth"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"hardware: {name} = {getattr(self, name)} is out of range: give a rate above 0")

    def on_cores(self, num_cores: float, shared_bandwidth: float) -> Self:
        """Return the rates of a rank that uses `num_cores` cores with these rates. `shared_bandwidth` is the memory
        bandwidth of all cores together, in bytes per second."""
        return replace(
            self,
            linear_flops=self.linear_flops * num_cores,
            pair_flops=self.pair_flops * num_cores,
            memory_bandwidth=min(self.memory_bandwidth * num_cores, shared_bandwidth),
        )


@dataclass(frozen=True)
class ModelCosts:
    """Costs of a model with which predictions begin: those of prefill on a rank, and of steps on an engine."""

    shape: ModelShape
    prefill: CostModel
    step: WorkCost
    bytes_per_weight: float
    """Mean size of one weight in bytes, as the model is stored in memory."""

    @classmethod
    def of(
        cls, shape: ModelShape, rank: Hardware, *, engine: Hardware | None = None, bytes_per_weight: float | None = None
    ) -> Self:
        """Return the costs that are derived from the model's FLOPs and bytes and the rates of the hardware. `engine`:
        hardware of the engine; None: that of the rank. `bytes_per_weight`: None: the size of one value of the dtype."""
        size = bytes_per_weight or shape.dtype_bytes
        step = derive_step(shape, engine or rank, weight_bytes=shape.step_weights * size)
        return cls(shape, derive(shape, rank), step, size)


def derive(shape: ModelShape, hardware: Hardware) -> CostModel:
    """Return the prefill costs of a model, derived from its FLOPs and bytes and the rates of the hardware."""
    return CostModel(
        num_layers=shape.num_layers,
        linear_s=shape.linear_flops / hardware.linear_flops,
        pair_s=max(shape.pair_flops / hardware.pair_flops, shape.num_heads / hardware.scores_per_s),
        kv_bytes=shape.kv_bytes,
        project_share=shape.project_share,
        fixed_s=hardware.fixed_s,
        issue_s=hardware.issue_s,
        head_s=2 * shape.hidden * shape.vocab / hardware.linear_flops,
        copy_s=2 * shape.kv_bytes / hardware.memory_bandwidth,
        link=hardware.link,
    )


def derive_step(shape: ModelShape, hardware: Hardware, *, weight_bytes: float) -> WorkCost:
    """Return the cost of a generation step, derived from the model's FLOPs and bytes and the rates of the hardware.

    `weight_bytes` is the size of all weights that a step with one token reads. In a mixture of experts, each further
    token of a step makes the step read additional experts. The returned cost of a token includes the time of reading
    them: the mean time for each token after the first, in a step with `_MIXED_TOKENS` tokens.
    """
    further = (shape.read_weights(_MIXED_TOKENS) - shape.read_weights(1)) / (_MIXED_TOKENS - 1)
    further_s = weight_bytes / hardware.memory_bandwidth * further / shape.read_weights(1)
    return WorkCost(
        step_s=weight_bytes / hardware.memory_bandwidth + shape.num_layers * hardware.fixed_s,
        token_s=2 * shape.step_weights / hardware.linear_flops + further_s,
        key_s=shape.num_layers * shape.kv_bytes / hardware.memory_bandwidth,
        pair_s=shape.num_layers * shape.pair_flops / hardware.pair_flops,
    )


# One core of an AMD EPYC (Zen 4) whose neighbours compute too, with loopback between ranks.
CPU_CORE = Hardware(2.1e11, 1.65e11, LinkModel(1e-4, 2e9), memory_bandwidth=1e10)
"""Assumed rates of one CPU core in bf16. Torch computes matrix products, and the native kernel computes attention."""
CPU_CORE_FP32 = Hardware(1e11, 7.5e10, LinkModel(1e-4, 2e9), memory_bandwidth=1e10)
"""Assumed rates of one CPU core in fp32. Torch computes both matrix products and attention."""


def cpu_rank(num_threads: float, dtype_bytes: int) -> Hardware:
    """Return the estimated rates of a CPU rank that uses `num_threads` cores, with the memory bandwidth of one core for
    all. `dtype_bytes` is 2 for bf16 and 4 for fp32."""
    core = CPU_CORE if dtype_bytes == 2 else CPU_CORE_FP32
    return core.on_cores(num_threads, core.memory_bandwidth)
