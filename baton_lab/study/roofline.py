"""Minimum duration of a generation step, by the roofline of inference ("How To Scale Your Model", part 7). Pure.

    step = batch * KV bytes / bandwidth  +  max(2 * batch * parameters / FLOP/s, weight bytes / bandwidth)
           attention: reads                     matrices: read, or compute from the critical batch on

A step with q tokens per sequence, such as one that verifies drafts, computes q times as much and reads the same. Its
attention takes max(time to read KV, time to compare queries with keys). With one token per sequence, reading is the
longer on every known chip.

On n chips, all rates and the memory are n times those of one chip: weights and KV are assumed to be spread evenly, and
communication between chips to take no time. A measured machine adds terms that a roofline omits
(`baton.planning.chips.Chip`): a separate rate of attention, imperfect overlap in matrices, and other time per layer.
"""

import math
from dataclasses import dataclass

from baton.errors import ConfigError
from baton.planning.chips import Chip
from baton.planning.model_shape import ModelShape


@dataclass(frozen=True)
class ServedModel:
    """Bytes and operations of a model in a generation step, in the formats in which it is served."""

    num_params: float
    """Number of all parameters, including both embeddings if they are separate, although a step reads only a few rows
    of one."""
    kv_token_bytes: float
    """Bytes of K and V of one token in all layers."""
    weight_bytes: float = 2
    """Bytes of one parameter: 2 for bf16, 1 for int8."""
    num_layers: int = 1
    windows: tuple[int | None, ...] = ()
    """Sliding window of each layer in tokens; None for a layer with full attention. Empty: full attention in all
    layers."""
    active_params: float | None = None
    """Number of parameters used for one token; None: all."""
    experts_per_active: float = 1
    """Number of experts divided by the number of experts used for a token."""
    pair_flops: float = 0
    """FLOPs of one query-key pair in all layers; 0: the arithmetic of attention is ignored."""

    def __post_init__(self) -> None:
        for name in ("num_params", "kv_token_bytes", "weight_bytes", "num_layers", "experts_per_active"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"model: {name} = {getattr(self, name)} is out of range: give a number above 0")
        if self.windows and len(self.windows) != self.num_layers:
            raise ConfigError(f"model: {len(self.windows)} windows for {self.num_layers} layers: give one for each")

    @property
    def all_weight_bytes(self) -> float:
        """Total number of bytes of all parameters."""
        return self.num_params * self.weight_bytes

    @property
    def token_flops(self) -> float:
        """FLOPs of one token in the matrices."""
        return 2 * (self.active_params or self.num_params)

    def kv_bytes(self, context: int) -> float:
        """Return the number of KV bytes that a sequence of `context` tokens stores."""
        return self.kv_token_bytes * context

    def kv_read_bytes(self, context: int) -> float:
        """Return the number of KV bytes that a step reads for a sequence of `context` tokens. Keys outside of sliding
        windows are not read."""
        return self.kv_token_bytes * self.keys_seen(context)

    def keys_seen(self, context: int) -> float:
        """Return the number of keys that a token attends to at `context` tokens, averaged over all layers."""
        seen = [context if window is None else min(context, window) for window in self.windows]
        return sum(seen) / self.num_layers if seen else context


@dataclass(frozen=True)
class Mixture:
    """Mixture of experts: each layer has `num_experts` feed-forward networks, of which a token uses `num_active`."""

    num_experts: int = 1
    num_active: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.num_active <= self.num_experts:
            raise ConfigError(
                f"experts: {self.num_active} of {self.num_experts}: give at least 1, and no more than all"
            )


def served(
    shape: ModelShape, *, tied: bool, weight_bytes: float, kv_bytes: float, mixture: Mixture | None = None
) -> ServedModel:
    """Return the ServedModel for a shape. `tied`: the head is the embedding. `weight_bytes` per parameter, `kv_bytes`
    per element of K or V, and `mixture`, if given, replace those of the shape. Biases, norms and routers are
    ignored."""
    mixture, ffn = mixture or Mixture(shape.num_experts, shape.num_active_experts), shape.ffn_weights
    others = shape.num_layers * (shape.layer_weights - shape.num_active_experts * ffn)
    others += (1 if tied else 2) * shape.vocab * shape.hidden
    return ServedModel(
        num_params=others + shape.num_layers * ffn * mixture.num_experts,
        kv_token_bytes=shape.num_layers * shape.kv_bytes / shape.dtype_bytes * kv_bytes,
        weight_bytes=weight_bytes,
        num_layers=shape.num_layers,
        active_params=others + shape.num_layers * ffn * mixture.num_active,
        experts_per_active=mixture.num_experts / mixture.num_active,
        pair_flops=shape.num_layers * shape.pair_flops,
    )


@dataclass(frozen=True)
class StepTime:
    """Components of the duration of a generation step, in seconds."""

    attention_s: float
    read_s: float
    """Seconds to read all weights."""
    compute_s: float
    """Seconds of the arithmetic of the matrices."""
    linear_s: float
    """Seconds of reading and computing the matrices, with their overlap."""
    other_s: float
    """Seconds of work that a roofline omits."""

    @property
    def total_s(self) -> float:
        """Seconds of the whole step."""
        return self.attention_s + self.linear_s + self.other_s

    @property
    def bound(self) -> str:
        """Name of the largest component: kv, weights, compute or calls."""
        parts = {"kv": self.attention_s, "weights": self.read_s, "compute": self.compute_s, "calls": self.other_s}
        return max(parts, key=lambda name: parts[name])


def step_time(
    model: ServedModel, chip: Chip, *, batch: int, context: int, num_chips: int = 1, num_queries: int = 1
) -> StepTime:
    """Return the components of a step for `batch` sequences of `context` tokens. The step reads all experts of a
    mixture. `num_queries`: number of tokens per sequence that the step computes, all of which attend to the whole
    context."""
    read_s = model.all_weight_bytes / (chip.memory_bandwidth * num_chips)
    compute_s = batch * num_queries * model.token_flops / (chip.flops * num_chips)
    shorter, longer = sorted((read_s, compute_s))
    kv_s = batch * model.kv_read_bytes(context) / ((chip.kv_bandwidth or chip.memory_bandwidth) * num_chips)
    pairs_s = batch * num_queries * model.keys_seen(context) * model.pair_flops / (chip.flops * num_chips)
    return StepTime(
        attention_s=max(kv_s, pairs_s),
        read_s=read_s,
        compute_s=compute_s,
        linear_s=longer + (1 - chip.overlap) * shorter,
        other_s=model.num_layers * chip.layer_s,
    )


def critical_batch(model: ServedModel, chip: Chip) -> float:
    """Return the batch size above which the matrices are bound by compute, for any number of chips. For a mixture, this
    is the value for its experts. In the notation of the source it is beta * C / W, with activations of two bytes."""
    return chip.flops / chip.memory_bandwidth * model.weight_bytes / 2 * model.experts_per_active


def largest_batch(model: ServedModel, chip: Chip, context: int, num_chips: int = 1) -> int:
    """Return the number of sequences of `context` tokens that fit in memory together with the weights; 0 if the weights
    do not fit."""
    free = chip.memory_bytes * num_chips - model.all_weight_bytes
    return max(0, int(free // model.kv_bytes(context)))
