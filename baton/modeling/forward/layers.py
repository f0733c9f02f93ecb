"""Components of a layer, as data. A family composes them when its weights are loaded, and `decoder` runs them.

A layer is a norm, a fused projection, and a tail: the output projection, residuals, norms and MLP that follow the
attention. Families differ in the order of the components. No component depends on a family.

Legend: T tokens, D hidden, I intermediate, N heads, G kv heads, H head dim, W = N * H, K = N + G queries and keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from baton.modeling.forward.linear import Linear
from baton.modeling.forward.norms import Transform, unchanged

Tail = Callable[[Tensor, Tensor], Tensor]
"""Function (hidden_TD, attended_TW) that returns the hidden states of the layer, `[T, D]`. `attended_TW` is the output
of the attention."""

ACTIVATIONS: dict[str, Transform] = {"relu": F.relu, "gelu": F.gelu}
"""Activations between an MLP's two projections, by Hugging Face's names."""


class Mlp(Protocol):
    """The feed-forward part of a layer, which mixes a token's channels."""

    def __call__(self, x_TD: Tensor, norm: Transform = unchanged, residual_TD: Tensor | None = None) -> Tensor:
        """Return the MLP of `norm(x)`, plus the residual if one is given: `[T, D]`."""


@dataclass(frozen=True)
class GatedMlp:
    """A gated MLP: SwiGLU (Shazeer, 2020)."""

    gate_up: Linear
    """Gated projection: gate rows, then up rows."""
    down: Linear

    def __call__(self, x_TD: Tensor, norm: Transform = unchanged, residual_TD: Tensor | None = None) -> Tensor:
        return self.down(self.gate_up(x_TD, norm), residual_TN=residual_TD)


@dataclass(frozen=True)
class ActivatedMlp:
    """Gated MLP with an activation other than silu, such as GeGLU (Shazeer, 2020)."""

    gate_up: Linear
    """Linear layer for gate rows, then up rows. It does not apply the gate itself."""
    activation: Transform
    down: Linear

    def __call__(self, x_TD: Tensor, norm: Transform = unchanged, residual_TD: Tensor | None = None) -> Tensor:
        gate_TI, up_TI = self.gate_up(x_TD, norm).chunk(2, dim=-1)
        return self.down(self.activation(gate_TI) * up_TI, residual_TN=residual_TD)


@dataclass(frozen=True)
class PlainMlp:
    """Two projections with an activation between them."""

    up: Linear
    activation: Transform
    down: Linear

    def __call__(self, x_TD: Tensor, norm: Transform = unchanged, residual_TD: Tensor | None = None) -> Tensor:
        return self.down(self.activation(self.up(x_TD, norm)), residual_TN=residual_TD)


@dataclass(frozen=True)
class Sequential:
    """Attention, then the MLP on the residual sum, each after its norm."""

    output: Linear
    norm: Transform
    mlp: Mlp

    def __call__(self, hidden_TD: Tensor, attended_TW: Tensor) -> Tensor:
        hidden_TD = self.output(attended_TW, residual_TN=hidden_TD)
        return self.mlp(hidden_TD, self.norm, hidden_TD)


@dataclass(frozen=True)
class Parallel:
    """Attention and MLP in parallel on the same hidden states (Wang and Komatsuzaki, 2021)."""

    output: Linear
    norm: Transform
    """Norm before the MLP: the same as the attention's norm (computed a second time), or another one."""
    mlp: Mlp

    def __call__(self, hidden_TD: Tensor, attended_TW: Tensor) -> Tensor:
        return self.mlp(hidden_TD, self.norm, self.output(attended_TW, residual_TN=hidden_TD.clone()))


@dataclass(frozen=True)
class PostNorm:
    """Order of the original Transformer (Vaswani et al., 2017): norms after the residual sums, none before them."""

    output: Linear
    attention_norm: Transform
    mlp: Mlp
    mlp_norm: Transform

    def __call__(self, hidden_TD: Tensor, attended_TW: Tensor) -> Tensor:
        hidden_TD = self.attention_norm(self.output(attended_TW, residual_TN=hidden_TD))
        return self.mlp_norm(self.mlp(hidden_TD, residual_TD=hidden_TD))


@dataclass(frozen=True)
class SandwichNorm:
    """Attention, then the MLP, each with a norm before it and one after it, before the residual sum (Ding et al.,
    2021)."""

    output: Linear
    attention_norm: Transform
    """Norm after the attention."""
    norm: Transform
    """Norm before the MLP."""
    mlp: Mlp
    mlp_norm: Transform
    """Norm after the MLP."""

    def __call__(self, hidden_TD: Tensor, attended_TW: Tensor) -> Tensor:
        hidden_TD = hidden_TD + self.attention_norm(self.output(attended_TW))
        return hidden_TD + self.mlp_norm(self.mlp(hidden_TD, self.norm))


@dataclass(frozen=True)
class Layer:
    """One layer: the components before the attention, and the tail after it."""

    attention_norm: Transform
    qkv: Linear
    """Fused projection `[(N + 2 G) * H, D]`: query rows, key rows, value rows."""
    head_norm: Transform
    """Norm of queries and keys `[T, K, H]`, before RoPE."""
    tail: Tail
