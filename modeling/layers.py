"""The pieces of a layer, as data: a family composes them when its weights are loaded, the decoder runs what came.

A layer is a norm, fused projections and an output projection, and a tail: the residuals, norms and MLP that follow the
attention. Families differ in which piece stands where; no piece knows of a family.

Legend: T tokens, D hidden, I intermediate, N heads, G kv heads, H head dim, K = N + G queries and keys. Projections are
`[out, in]`, as F.linear takes them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Transform = Callable[[Tensor], Tensor]
"""A tensor to one of the same shape: norms, MLPs, activations."""

Tail = Callable[[Tensor, Tensor], Tensor]
"""(hidden_TD, attended_TD) -> the layer's hidden states `[T, D]`; `attended_TD` comes from the output projection."""

ACTIVATIONS: dict[str, Transform] = {"relu": F.relu, "gelu": F.gelu}
"""Between an MLP's two projections, by Hugging Face's names."""


def unchanged(x: Tensor) -> Tensor:
    """The piece that is not there."""
    return x


@dataclass(frozen=True)
class RmsNorm:
    """Root mean square norm (Zhang and Sennrich, 2019) over the last dimension."""

    gain_D: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.gain_D, self.eps)


@dataclass(frozen=True)
class LayerNorm:
    """Layer norm (Ba et al., 2016) over the last dimension; without parameters where they are None."""

    gain_D: Tensor | None
    bias_D: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), self.gain_D, self.bias_D, self.eps)


@dataclass(frozen=True)
class HeadNorms:
    """RMSNorm per head on `[T, K, H]`, the queries and keys before RoPE (Qwen3)."""

    q_norm: RmsNorm
    k_norm: RmsNorm
    num_heads: int

    def __call__(self, qk_TKH: Tensor) -> Tensor:
        q_TNH, k_TGH = qk_TKH[:, : self.num_heads], qk_TKH[:, self.num_heads :]
        return torch.cat((self.q_norm(q_TNH), self.k_norm(k_TGH)), dim=1)


@dataclass(frozen=True)
class GatedMlp:
    """SwiGLU (Shazeer, 2020)."""

    gate_up_proj: Tensor
    """`[2 * I, D]`: gate rows, then up rows."""
    gate_up_bias: Tensor | None
    down_proj: Tensor
    down_bias: Tensor | None

    def __call__(self, x_TD: Tensor) -> Tensor:
        gate_TI, up_TI = F.linear(x_TD, self.gate_up_proj, self.gate_up_bias).chunk(2, dim=-1)
        return F.linear(F.silu(gate_TI).mul_(up_TI), self.down_proj, self.down_bias)


@dataclass(frozen=True)
class PlainMlp:
    """Two projections with an activation between them."""

    up_proj: Tensor
    up_bias: Tensor | None
    activation: Transform
    down_proj: Tensor
    down_bias: Tensor | None

    def __call__(self, x_TD: Tensor) -> Tensor:
        return F.linear(self.activation(F.linear(x_TD, self.up_proj, self.up_bias)), self.down_proj, self.down_bias)


@dataclass(frozen=True)
class Sequential:
    """Attention, then the MLP on what attention made, each behind its norm."""

    norm: Transform
    mlp: Transform

    def __call__(self, hidden_TD: Tensor, attended_TD: Tensor) -> Tensor:
        hidden_TD = hidden_TD + attended_TD
        return hidden_TD + self.mlp(self.norm(hidden_TD))


@dataclass(frozen=True)
class Parallel:
    """Attention and MLP side by side on the same hidden states (Wang and Komatsuzaki, 2021)."""

    norm: Transform
    """The attention's own norm, run once more, or another."""
    mlp: Transform

    def __call__(self, hidden_TD: Tensor, attended_TD: Tensor) -> Tensor:
        return hidden_TD + attended_TD + self.mlp(self.norm(hidden_TD))


@dataclass(frozen=True)
class PostNorm:
    """The original Transformer's order (Vaswani et al., 2017): norms behind the residual sums, none before them."""

    attention_norm: Transform
    mlp: Transform
    mlp_norm: Transform

    def __call__(self, hidden_TD: Tensor, attended_TD: Tensor) -> Tensor:
        hidden_TD = self.attention_norm(hidden_TD + attended_TD)
        return self.mlp_norm(hidden_TD + self.mlp(hidden_TD))


@dataclass(frozen=True)
class Layer:
    """One layer: what the decoder does before attention, and what it does after."""

    attention_norm: Transform
    qkv_proj: Tensor
    """`[(N + 2 G) * H, D]`: query rows, key rows, value rows."""
    qkv_bias: Tensor | None
    head_norm: Transform
    """On queries and keys `[T, K, H]`, before positions turn them."""
    o_proj: Tensor
    o_bias: Tensor | None
    tail: Tail
