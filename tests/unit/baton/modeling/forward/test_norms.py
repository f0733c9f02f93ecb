"""Norms against their formulas in float64."""

import torch
from torch import Tensor

from baton.modeling.forward.norms import HeadNorms, LayerNorm, RmsNorm, WideRmsNorm, unchanged

EPS = 1e-3


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)


def rms_normed(x: Tensor, gain: Tensor) -> Tensor:
    return gain * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def layer_normed(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt()


def test_rms_norm() -> None:
    x_TD, gain_D = random(3, 8), random(8, seed=1)
    check(RmsNorm(gain_D, EPS)(x_TD), rms_normed(x_TD, gain_D))


def test_wide_rms_norm_rounds_once() -> None:
    """Its gain is kept in fp32, where bf16 would round it as well."""
    x_TD, gain_D = random(3, 8).bfloat16(), 1.0 + random(8, seed=1).float()
    expected_TD = rms_normed(x_TD.double(), gain_D.double()).bfloat16()
    got_TD = WideRmsNorm(gain_D, EPS)(x_TD)
    assert got_TD.dtype == torch.bfloat16
    assert torch.equal(got_TD, expected_TD)


def test_layer_norm_with_gain_and_bias_and_with_neither() -> None:
    x_TD, gain_D, bias_D = random(3, 8), random(8, seed=1), random(8, seed=2)
    check(LayerNorm(gain_D, bias_D, EPS)(x_TD), layer_normed(x_TD) * gain_D + bias_D)
    check(LayerNorm(None, None, EPS)(x_TD), layer_normed(x_TD))


def test_head_norms_take_queries_and_keys_apart() -> None:
    qk_TKH, q_gain_H, k_gain_H = random(3, 6, 8), random(8, seed=1), random(8, seed=2)
    got_TKH = HeadNorms(RmsNorm(q_gain_H, EPS), RmsNorm(k_gain_H, EPS), num_heads=4)(qk_TKH)
    check(got_TKH[:, :4], rms_normed(qk_TKH[:, :4], q_gain_H))
    check(got_TKH[:, 4:], rms_normed(qk_TKH[:, 4:], k_gain_H))


def test_the_piece_that_is_not_there_is_the_tensor_itself() -> None:
    x_TD = random(3, 8)
    assert unchanged(x_TD) is x_TD
