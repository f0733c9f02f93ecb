"""Norms, gates and rotations with Triton. Each operation makes one pass over the tokens, whereas torch launches several
kernels.

In a decode step with few tokens, a launch costs more than the work of its kernel. In a long prompt, every pass over the
tokens is significant. Results equal those of torch's operations except for rounding: they are rounded only once.

Shape letters: T tokens, D channels, I gated channels, N heads, H head dim.
"""

from torch import Tensor

from baton.modeling.kernels.triton.heads import Heads
from baton.modeling.kernels.triton.launch import DTYPES, check, launch, require_triton
from baton.modeling.kernels.triton.tiles import power_of_two

MOST_CHANNELS = 1 << 14
"""Maximum number of channels that a norm supports. One program processes all channels of a token."""
_GATE_TILE = 1024
_TURN_ELEMENTS = 1024
"""Maximum number of pairs of elements that a program rotates at once. RoPE pairs each element of the first half of a
head with an element of the second half."""


def rms_norm(x_TD: Tensor, gain_D: Tensor, eps: float) -> Tensor:
    """Apply a root mean square norm over the last dimension, and return the result `[..., D]` in the dtype of `x_TD`.
    Does not wait for the device. Raises RuntimeError for tensors that do not fit together, and ConfigError if Triton is
    not installed."""
    require_triton()
    from baton.modeling.kernels.triton import pointwise_kernels as kernels

    width = x_TD.shape[-1]
    check(x_TD.is_contiguous() and x_TD.dtype in DTYPES, f"channels must be contiguous, in one of {DTYPES}")
    check(gain_D.shape == (width,) and gain_D.is_contiguous(), f"the gain must be [{width}], contiguous")
    check(0 < width <= MOST_CHANNELS, f"{width} channels: a norm takes 1 to {MOST_CHANNELS}")
    o_TD = x_TD.new_empty(x_TD.shape)
    if x_TD.numel():
        width_pad = power_of_two(width)
        num_warps = min(max(width_pad // 512, 1), 8)
        grid, shape = (x_TD.numel() // width,), kernels.NormShape(width, width_pad, eps)
        launch(x_TD.device, kernels.norm_token, grid, x_TD, gain_D, o_TD, shape, num_warps=num_warps)
    return o_TD


def gate(x_TI: Tensor) -> Tensor:
    """Return silu(first half of the channels) times the second half (SwiGLU; Shazeer, 2020). The input is `[T, 2 I]`,
    the result `[T, I]`. Does not wait for the device. Raises RuntimeError for an unsupported tensor, and ConfigError if
    Triton is not installed."""
    require_triton()
    from baton.modeling.kernels.triton import pointwise_kernels as kernels

    check(x_TI.dim() == 2 and x_TI.shape[1] % 2 == 0, f"gates and ups must be [T, 2 I], not {list(x_TI.shape)}")
    check(x_TI.is_contiguous() and x_TI.dtype in DTYPES, f"gates and ups must be contiguous, in one of {DTYPES}")
    num_tokens, width = len(x_TI), x_TI.shape[1] // 2
    o_TI = x_TI.new_empty((num_tokens, width))
    if o_TI.numel():
        grid = (num_tokens, -(-width // _GATE_TILE))
        launch(x_TI.device, kernels.gate_tile, grid, x_TI, o_TI, width, _GATE_TILE)
    return o_TI


def turn_heads(x_TNH: Tensor, cos_T1H: Tensor, sin_T1H: Tensor) -> None:
    """Apply RoPE to the heads of all tokens in place. Dimension i of a head is paired with i + H / 2. `sin_T1H` must be
    negated in the first half of each head. `x_TNH` may be a strided view, but each head must be contiguous. Does
    not wait for the device. Raises RuntimeError for tensors that do not fit together, and ConfigError if Triton is not
    installed."""
    require_triton()
    from baton.modeling.kernels.triton import pointwise_kernels as kernels

    num_tokens, num_heads, head_dim = x_TNH.shape
    check(x_TNH.stride(2) == 1 and x_TNH.dtype in DTYPES, f"each head must be contiguous, in one of {DTYPES}")
    check(head_dim % 2 == 0, f"head dim {head_dim} has no halves")
    for each in (cos_T1H, sin_T1H):
        fits = each.shape == (num_tokens, 1, head_dim) and each.is_contiguous()
        check(fits, f"factors must be [{num_tokens}, 1, {head_dim}], contiguous")
    if not x_TNH.numel():
        return
    half_pad = power_of_two(head_dim // 2)
    tile_heads = min(power_of_two(num_heads), max(_TURN_ELEMENTS // half_pad, 1))
    shape = kernels.TurnShape(num_heads, tile_heads, head_dim // 2, half_pad)
    x = Heads(x_TNH, x_TNH.stride(0), x_TNH.stride(1))
    grid = (num_tokens, -(-num_heads // tile_heads))
    launch(x_TNH.device, kernels.turn_heads, grid, x, cos_T1H, sin_T1H, shape, num_warps=4)
