"""Minimum duration of a generation step, by the roofline model of inference ("How To Scale Your Model", part 7). Does
no I/O.

    step = batch * KV bytes / bandwidth  +  max(2 * batch * parameters / FLOP/s, weight bytes / bandwidth)
           attention: time to read KV           matrices: time to compute or to read weights, whichever is longer

A step may have several tokens per sequence, for example to verify drafts. With q tokens per sequence a step computes q
times as much and reads the same bytes. Its attention takes the longer of the time to read KV and the time to compare
queries with keys. With one token per sequence, reading takes longer on every known chip.

On n chips, all rates and the memory are n times those of one chip. This assumes that weights and KV are spread evenly,
and that communication between chips takes no time. For a measured machine, terms are added that a roofline model omits
(`baton.planning.chips.Chip`): a separate rate of attention, imperfect overlap in matrices, and other time per layer.
"""

import math
from dataclasses import dataclass

from baton.errors import ConfigError
from baton.planning.chips import Chip
from baton.planning.model_shape import ModelShape


@dataclass(frozen=True)
class ServedModel:
    """Bytes and FLOPs of a model in a generation step, with the number formats in which the model is served."""

    num_params: float
    """Number of all parameters. It includes both the input and the output embedding if they are separate, although a
    step reads only a few rows of the input embedding."""
    kv_token_bytes: float
    """Number of bytes of K and V of one token in all layers."""
    weight_bytes: float = 2
    """Number of bytes per parameter: 2 for bf16, 1 for int8."""
    num_layers: int = 1
    windows: tuple[int | None, ...] = ()
    """Size in tokens of each layer's sliding window; None for a layer with full attention. Empty if all layers have
    full attention."""
    active_params: float | None = None
    """Number of parameters that are used for one token; None if all are used."""
    experts_per_active: float = 1
    """Number of experts of a layer, divided by the number of experts that one token uses; 1 without a mixture of
    experts."""
    pair_flops: float = 0
    """FLOPs of attention for one query-key pair, summed over all layers. 0: the FLOPs of attention are ignored."""

    def __post_init__(self) -> None:
        for name in ("num_params", "kv_token_bytes", "weight_bytes", "num_layers", "experts_per_active"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"model: {name} = {getattr(self, name)} is out of range: give a number above 0")
        if self.windows and len(self.windows) != self.num_layers:
            raise ConfigError(f"model: {len(self.windows)} windows for {self.num_layers} layers: give one for each")

    @property
    def all_weight_bytes(self) -> float:
        """Number of bytes of all parameters together."""
        return self.num_params * self.weight_bytes

    @property
    def token_flops(self) -> float:
        """Number of FLOPs for one token in the products with the model's matrices."""
        return 2 * (self.active_params or self.num_params)

    def kv_bytes(self, context: int) -> float:
        """Return the number of KV bytes that a sequence of `context` tokens stores."""
        return self.kv_token_bytes * context

    def kv_read_bytes(self, context: int) -> float:
        """Return the number of KV bytes that a step reads for a sequence of `context` tokens. Keys outside the sliding
        windows are not read."""
        return self.kv_token_bytes * self.keys_seen(context)

    def keys_seen(self, context: int) -> float:
        """Return the number of keys that a token attends to in a sequence of `context` tokens, as the mean over all
        layers."""
        seen = [context if window is None else min(context, window) for window in self.windows]
        return sum(seen) / self.num_layers if seen else context


@dataclass(frozen=True)
class Mixture:
    """Mixture of experts. Each layer has `num_experts` feed-forward networks, and each token uses `num_active` of
    them."""

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
    """Return the ServedModel for a model shape.

    `tied`: True if the output head shares its weights with the embedding. `weight_bytes`: bytes per parameter.
    `kv_bytes`: bytes per element of K or V. `mixture`: mixture of experts to use instead of that of `shape`; None: that
    of `shape`. Biases, norms and routers are ignored.
    """
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
    """Predicted duration of a generation step, by component, in seconds."""

    attention_s: float
    read_s: float
    """Seconds to read all weights from memory."""
    compute_s: float
    """Seconds to compute the products with the model's matrices."""
    linear_s: float
    """Seconds to read the weights and compute the matrix products. Reading and computing overlap (`Chip.overlap`)."""
    other_s: float
    """Seconds of the chip's fixed overhead per layer, summed over all layers. 0 if no overhead was measured."""

    @property
    def total_s(self) -> float:
        """Seconds of the whole step."""
        return self.attention_s + self.linear_s + self.other_s

    @property
    def bound(self) -> str:
        """Name of the component that takes most time: `kv` (attention), `weights` (reading the weights), `compute`
        (products with the model's matrices) or `calls` (fixed overhead of each layer)."""
        parts = {"kv": self.attention_s, "weights": self.read_s, "compute": self.compute_s, "calls": self.other_s}
        return max(parts, key=lambda name: parts[name])


def step_time(
    model: ServedModel, chip: Chip, *, batch: int, context: int, num_chips: int = 1, num_queries: int = 1
) -> StepTime:
    """Return the components of the duration of a step for `batch` sequences of `context` tokens each.

    `num_queries`: number of tokens per sequence that the step computes; each of them attends to the whole context. For
    a mixture of experts, the step reads all experts.
    """
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
    """Return the batch size above which the model's matrices are limited by compute instead of memory bandwidth. It is
    the same for any number of chips. For a mixture of experts, it is the batch size for the experts' matrices. "How To
    Scale Your Model" writes it as beta * C / W (bytes per parameter / bytes per activation * FLOP/s / bandwidth), with
    activations of two bytes."""
    return chip.flops / chip.memory_bandwidth * model.weight_bytes / 2 * model.experts_per_active


def largest_batch(model: ServedModel, chip: Chip, context: int, num_chips: int = 1) -> int:
    """Return the maximum number of sequences of `context` tokens that fit into memory together with the weights. Return
    0 if the weights do not fit."""
    free = chip.memory_bytes * num_chips - model.all_weight_bytes
    return max(0, int(free // model.kv_bytes(context)))
