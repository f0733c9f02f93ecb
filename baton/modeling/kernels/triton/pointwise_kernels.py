"""Triton kernels of norms, gates and rotations: the operations between a layer's matrix products and its attention.
Each kernel makes one pass over the tokens. Sums and products are fp32, and results are rounded once. Imports Triton.

Shape letters: T tokens, D channels (padded), I gated channels, N heads of a token, H head dim, F = H / 2 (padded), X
elements of a tile.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from baton.modeling.kernels.triton.heads import Heads


@dataclass(frozen=True)
class NormShape:
    """Compile-time parameters of `norm_token`. Each combination of values is compiled separately."""

    width: int
    width_pad: int
    eps: float


@dataclass(frozen=True)
class TurnShape:
    """Compile-time parameters of `turn_heads`. Each combination of values is compiled separately."""

    num_heads: int
    tile_heads: int
    """Number of heads that one program rotates, a power of two."""
    half_dim: int
    half_pad: int


@triton.jit
def norm_token(x: tl.tensor, gain: tl.tensor, o: tl.tensor, shape: tl.constexpr) -> None:
    """Kernel that divides a token's channels by their root mean square, and multiplies them by the gain. Grid: (T,)."""
    channel_D = tl.arange(0, shape.width_pad)
    is_channel_D = channel_D < shape.width
    at = tl.program_id(0).to(tl.int64) * shape.width
    x_D = tl.load(x + at + channel_D, mask=is_channel_D, other=0.0).to(tl.float32)
    gain_D = tl.load(gain + channel_D, mask=is_channel_D, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x_D * x_D, 0) / shape.width + shape.eps)
    tl.store(o + at + channel_D, (x_D * scale * gain_D).to(o.dtype.element_ty), mask=is_channel_D)


@triton.jit
def gate_tile(x: tl.tensor, o: tl.tensor, width: tl.constexpr, tile: tl.constexpr) -> None:
    """Kernel that multiplies silu of the first half of a token's channels by the second half, for one tile. Grid: (T,
    tiles of I)."""
    token = tl.program_id(0).to(tl.int64)
    channel_X = tl.program_id(1) * tile + tl.arange(0, tile)
    is_channel_X = channel_X < width
    at_X = token * (2 * width) + channel_X
    gate_X = tl.load(x + at_X, mask=is_channel_X, other=0.0).to(tl.float32)
    up_X = tl.load(x + at_X + width, mask=is_channel_X, other=0.0).to(tl.float32)
    gated_X = gate_X / (1.0 + tl.exp(-gate_X)) * up_X
    tl.store(o + token * width + channel_X, gated_X.to(o.dtype.element_ty), mask=is_channel_X)


@triton.jit
def turn_heads(x: Heads, cos: tl.tensor, sin: tl.tensor, shape: tl.constexpr) -> None:
    """Kernel that rotates one tile of a token's heads in place. Grid: (T, tiles of N). Sines must be negated in the
    first half of each head."""
    token = tl.program_id(0).to(tl.int64)
    head_X = tl.program_id(1) * shape.tile_heads + tl.arange(0, shape.tile_heads)
    dim_F = tl.arange(0, shape.half_pad)
    is_dim_F = dim_F < shape.half_dim
    is_here_XF = (head_X < shape.num_heads)[:, None] & is_dim_F[None, :]
    at_XF = token * x.token_stride + head_X[:, None] * x.head_stride + dim_F[None, :]
    low_XF = tl.load(x.data + at_XF, mask=is_here_XF, other=0.0).to(tl.float32)
    high_XF = tl.load(x.data + at_XF + shape.half_dim, mask=is_here_XF, other=0.0).to(tl.float32)
    at_F = token * (2 * shape.half_dim) + dim_F
    low_cos_F = tl.load(cos + at_F, mask=is_dim_F, other=0.0).to(tl.float32)
    low_sin_F = tl.load(sin + at_F, mask=is_dim_F, other=0.0).to(tl.float32)
    high_cos_F = tl.load(cos + at_F + shape.half_dim, mask=is_dim_F, other=0.0).to(tl.float32)
    high_sin_F = tl.load(sin + at_F + shape.half_dim, mask=is_dim_F, other=0.0).to(tl.float32)
    turned_low_XF = low_XF * low_cos_F[None, :] + high_XF * low_sin_F[None, :]
    turned_high_XF = high_XF * high_cos_F[None, :] + low_XF * high_sin_F[None, :]
    tl.store(x.data + at_XF, turned_low_XF.to(x.data.dtype.element_ty), mask=is_here_XF)
    tl.store(x.data + at_XF + shape.half_dim, turned_high_XF.to(x.data.dtype.element_ty), mask=is_here_XF)
