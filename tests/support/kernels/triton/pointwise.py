"""Checks of Triton's norms, gates and rotations against their definitions in float64."""

import torch
from torch import Tensor

from baton.modeling.kernels.triton.pointwise import gate, rms_norm, turn_heads

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
WIDTHS = (1, 80, 4096, 5000)
"""Numbers of channels: one, fewer than a tile of any kernel, equal to some tiles, and slightly more."""
HEADS = [(1, 64), (5, 96), (40, 128), (9, 256), (71, 64)]
"""Number of heads per token, and head dim: one tile and several, with dims that are powers of two and others."""
NUM_TOKENS = 5
EPS = 1e-5


def check_norm(dtype: torch.dtype, width: int, device: str) -> None:
    """Assert that each token's channels are divided by their root mean square, for small and large values."""
    x_TD = _random(NUM_TOKENS, width, dtype=dtype) * torch.tensor([[1e-3], [1.0], [30.0], [0.0], [2.0]]).to(dtype)
    gain_D = _random(width, dtype=dtype)
    wide_TD = x_TD.double()
    expected_TD = wide_TD / (wide_TD.square().mean(1, keepdim=True) + EPS).sqrt() * gain_D.double()
    _assert_close(rms_norm(x_TD.to(device), gain_D.to(device), EPS), expected_TD, dtype)
    lists_T1D = rms_norm(x_TD.to(device).unsqueeze(1), gain_D.to(device), EPS)
    assert torch.equal(lists_T1D.squeeze(1), rms_norm(x_TD.to(device), gain_D.to(device), EPS))


def check_gate(dtype: torch.dtype, width: int, device: str) -> None:
    """Assert that a token's up projection is multiplied by silu of its gate, also for gates far from 0."""
    x_TI = _random(NUM_TOKENS, 2 * width, dtype=dtype)
    x_TI[0, :width] = 90.0
    x_TI[1, :width] = -90.0
    gate_TI, up_TI = x_TI.double().chunk(2, dim=1)
    _assert_close(gate(x_TI.to(device)), gate_TI * gate_TI.sigmoid() * up_TI, dtype)


def check_turn(dtype: torch.dtype, num_heads: int, head_dim: int, device: str) -> None:
    """Assert that the heads are rotated in place by their token's angles, and that the heads after them do not
    change."""
    fused_TKH = _random(NUM_TOKENS, num_heads + 2, head_dim, dtype=dtype)  # as projected: values after keys
    angle_TF = 20 * torch.rand(NUM_TOKENS, head_dim // 2, generator=torch.Generator().manual_seed(3))
    cos_T1H, sin_T1H = (
        torch.cat(halves, 1).to(dtype).unsqueeze(1)
        for halves in ((angle_TF.cos(), angle_TF.cos()), (-angle_TF.sin(), angle_TF.sin()))
    )
    low_TNF, high_TNF = fused_TKH[:, :num_heads].double().chunk(2, dim=2)
    (low_cos, high_cos), (low_sin, high_sin) = (each.double().chunk(2, dim=2) for each in (cos_T1H, sin_T1H))
    expected_TNH = torch.cat((low_TNF * low_cos + high_TNF * low_sin, high_TNF * high_cos + low_TNF * high_sin), 2)
    there_TKH = fused_TKH.to(device, copy=True)
    turn_heads(there_TKH[:, :num_heads], cos_T1H.to(device), sin_T1H.to(device))
    _assert_close(there_TKH[:, :num_heads], expected_TNH, dtype)
    assert torch.equal(there_TKH[:, num_heads:].cpu(), fused_TKH[:, num_heads:])


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def _assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    torch.testing.assert_close(found.cpu().double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
