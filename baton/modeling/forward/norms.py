"""Norms, as data: for use before projections, on heads, and at the end of a model.

Families choose them when `layers` are composed. T tokens, D hidden, N heads, H head dim, K = N + G queries and keys.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.modeling.kernels.triton.launch import compiles_for
from baton.modeling.kernels.triton.pointwise import MOST_CHANNELS, rms_norm

Transform = Callable[[Tensor], Tensor]
"""Function from a tensor to one of the same shape: a norm or an activation."""


def unchanged(x: Tensor) -> Tensor:
    """Return the tensor unchanged. Used in place of a norm in layers without one."""
    return x


@dataclass(frozen=True)
class RmsNorm:
    """Root mean square norm (Zhang and Sennrich, 2019) over the last dimension."""

    gain_D: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        if compiles_for(x.device, x.dtype) and x.is_contiguous() and x.shape[-1] <= MOST_CHANNELS:
            return rms_norm(x, self.gain_D, self.eps)
        return F.rms_norm(x, (x.shape[-1],), self.gain_D, self.eps)


@dataclass(frozen=True)
class WideRmsNorm:
    """Root mean square norm that computes and stores its gain in fp32. The result has the dtype of the input."""

    gain_D: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.gain_D, self.eps).to(x.dtype)


@dataclass(frozen=True)
class LayerNorm:
    """Layer norm (Ba et al., 2016) over the last dimension. Gain and bias are not applied if they are None."""

    gain_D: Tensor | None
    bias_D: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), self.gain_D, self.bias_D, self.eps)


@dataclass(frozen=True)
class HeadNorms:
    """Norms of each head on `[T, K, H]`, the queries and keys before RoPE (Qwen3, Gemma 3)."""

    q_norm: Transform
    k_norm: Transform
    num_heads: int

    def __call__(self, qk_TKH: Tensor) -> Tensor:
        q_TNH, k_TGH = qk_TKH[:, : self.num_heads], qk_TKH[:, self.num_heads :]
        return torch.cat((self.q_norm(q_TNH), self.k_norm(k_TGH)), dim=1)
