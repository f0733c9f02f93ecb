"""Norms, as dataclasses. They are applied before projections, to the heads of queries and keys, and at the end of a
model.

Families select norms when they compose `layers`.

Shape letters: T tokens, D hidden size, N heads, G kv heads, H head dim, K = N + G heads of queries and keys.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.modeling.kernels.triton.launch import compiles_for
from baton.modeling.kernels.triton.pointwise import MOST_CHANNELS, rms_norm

Transform = Callable[[Tensor], Tensor]
"""Function from a tensor to a tensor of the same shape: a norm or an activation."""


def unchanged(x: Tensor) -> Tensor:
    """Return the tensor unchanged. Layers without a norm use this function in place of a norm."""
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
    """Root mean square norm that is computed in fp32 and stores its gain in fp32. The result has the dtype of the
    input."""

    gain_D: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.gain_D, self.eps).to(x.dtype)


@dataclass(frozen=True)
class LayerNorm:
    """Layer norm (Ba et al., 2016) over the last dimension. A gain or bias that is None is not applied."""

    gain_D: Tensor | None
    bias_D: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), self.gain_D, self.bias_D, self.eps)


@dataclass(frozen=True)
class HeadNorms:
    """Norms of the queries and keys `[T, K, H]` before RoPE, computed per head (Qwen3, Gemma 3)."""

    q_norm: Transform
    k_norm: Transform
    num_heads: int

    def __call__(self, qk_TKH: Tensor) -> Tensor:
        q_TNH, k_TGH = qk_TKH[:, : self.num_heads], qk_TKH[:, self.num_heads :]
        return torch.cat((self.q_norm(q_TNH), self.k_norm(k_TGH)), dim=1)
