"""Components of a layer, as dataclasses. A family composes them when its weights are loaded, and `decoder` runs them.

A layer consists of a norm, a fused QKV projection, and a tail. The tail runs after the attention: output projection,
residuals, norms and MLP. Families differ in the order of these components. No component depends on a family.

Shape letters: T tokens, D hidden size, I intermediate size, N heads, G kv heads, H head dim, W = N * H, K = N + G heads
of queries and keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from baton.modeling.forward.linear import Linear
from baton.modeling.forward.norms import Transform, unchanged

Tail = Callable[[Tensor, Tensor], Tensor]
"""Function (hidden_TD, attended_TW) that computes the rest of a layer after the attention. `hidden_TD` is the input of
the layer, and `attended_TW` the output of the attention. Returns the hidden states after the layer, `[T, D]`."""

ACTIVATIONS: dict[str, Transform] = {"relu": F.relu, "gelu": F.gelu}
"""Activation functions of an MLP without a gate, by the names that Hugging Face uses."""


class Mlp(Protocol):
    """Interface of the feed-forward part of a layer."""

    def __call__(self, x_TD: Tensor, norm: Transform = unchanged, residual_TD: Tensor | None = None) -> Tensor:
        """Return the MLP of `norm(x)`, plus the residual if one is given: `[T, D]`."""


@dataclass(frozen=True)
class GatedMlp:
    """Gated MLP with silu: SwiGLU (Shazeer, 2020)."""

    gate_up: Linear
    """Fused gate and up projection. The gate rows come first, then the up rows. The layer also computes
    silu(gate) * up, and returns this product."""
    down: Linear

    def __call__(self, x_TD: Tensor, norm: Transform = unchanged, residual_TD: Tensor | None = None) -> Tensor:
        return self.down(self.gate_up(x_TD, norm), residual_TN=residual_TD)


@dataclass(frozen=True)
class ActivatedMlp:
    """Gated MLP whose activation is not silu, for example GeGLU (Shazeer, 2020)."""

    gate_up: Linear
    """Fused gate and up projection. The gate rows come first, then the up rows. The layer returns both
    projections side by side, without their product."""
    activation: Transform
    down: Linear

    def __call__(self, x_TD: Tensor, norm: Transform = unchanged, residual_TD: Tensor | None = None) -> Tensor:
        gate_TI, up_TI = self.gate_up(x_TD, norm).chunk(2, dim=-1)
        return self.down(self.activation(gate_TI) * up_TI, residual_TN=residual_TD)


@dataclass(frozen=True)
class PlainMlp:
    """MLP without a gate: an up projection, an activation and a down projection."""

    up: Linear
    activation: Transform
    down: Linear

    def __call__(self, x_TD: Tensor, norm: Transform = unchanged, residual_TD: Tensor | None = None) -> Tensor:
        return self.down(self.activation(self.up(x_TD, norm)), residual_TN=residual_TD)


@dataclass(frozen=True)
class Sequential:
    """Tail (rest of a layer after the attention) in which the MLP follows the attention. First, the attention's output
    is added to the residual. The MLP then reads the norm of this sum."""

    output: Linear
    norm: Transform
    mlp: Mlp

    def __call__(self, hidden_TD: Tensor, attended_TW: Tensor) -> Tensor:
        hidden_TD = self.output(attended_TW, residual_TN=hidden_TD)
        return self.mlp(hidden_TD, self.norm, hidden_TD)


@dataclass(frozen=True)
class Parallel:
    """Tail (rest of a layer after the attention) for layers whose attention and MLP read the same hidden states (Wang
    and Komatsuzaki, 2021)."""

    output: Linear
    norm: Transform
    """Norm before the MLP. It may be the same norm as that of the attention. In this case it is computed twice."""
    mlp: Mlp

    def __call__(self, hidden_TD: Tensor, attended_TW: Tensor) -> Tensor:
        return self.mlp(hidden_TD, self.norm, self.output(attended_TW, residual_TN=hidden_TD.clone()))


@dataclass(frozen=True)
class PostNorm:
    """Tail (rest of a layer after the attention) in the order of the original Transformer (Vaswani et al., 2017). Norms
    follow the residual sums. There are no norms before attention and MLP."""

    output: Linear
    attention_norm: Transform
    mlp: Mlp
    mlp_norm: Transform

    def __call__(self, hidden_TD: Tensor, attended_TW: Tensor) -> Tensor:
        hidden_TD = self.attention_norm(self.output(attended_TW, residual_TN=hidden_TD))
        return self.mlp_norm(self.mlp(hidden_TD, residual_TD=hidden_TD))


@dataclass(frozen=True)
class SandwichNorm:
    """Tail (rest of a layer after the attention) with norms on both sides (Ding et al., 2021). The attention has one
    norm before it and one after it, and so has the MLP. The norm after it is applied before the residual sum."""

    output: Linear
    attention_norm: Transform
    """Norm of the attention's output."""
    norm: Transform
    """Norm of the MLP's input."""
    mlp: Mlp
    mlp_norm: Transform
    """Norm of the MLP's output."""

    def __call__(self, hidden_TD: Tensor, attended_TW: Tensor) -> Tensor:
        hidden_TD = hidden_TD + self.attention_norm(self.output(attended_TW))
        return hidden_TD + self.mlp_norm(self.mlp(hidden_TD, self.norm))


@dataclass(frozen=True)
class Layer:
    """Components of one layer: the norm and the projections before the attention, and the tail (rest of the layer)
    after it."""

    attention_norm: Transform
    qkv: Linear
    """Fused projection with weight `[(N + 2 G) * H, D]`: the rows of the queries, then of the keys, then of the
    values."""
    head_norm: Transform
    """Norm of the queries and keys `[T, K, H]`, applied before RoPE."""
    tail: Tail
