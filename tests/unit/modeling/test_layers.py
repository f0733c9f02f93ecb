"""The pieces of a layer against their formulas in float64."""

import pytest
import torch
from torch import Tensor

from modeling.layers import (
    ACTIVATIONS,
    GatedMlp,
    HeadNorms,
    LayerNorm,
    Parallel,
    PlainMlp,
    PostNorm,
    RmsNorm,
    Sequential,
    Transform,
    unchanged,
)

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


def double(x: Tensor) -> Tensor:
    return 2 * x


def triple(x: Tensor) -> Tensor:
    return 3 * x


def test_rms_norm() -> None:
    x_TD, gain_D = random(3, 8), random(8, seed=1)
    check(RmsNorm(gain_D, EPS)(x_TD), rms_normed(x_TD, gain_D))


def test_layer_norm_with_gain_and_bias_and_with_neither() -> None:
    x_TD, gain_D, bias_D = random(3, 8), random(8, seed=1), random(8, seed=2)
    check(LayerNorm(gain_D, bias_D, EPS)(x_TD), layer_normed(x_TD) * gain_D + bias_D)
    check(LayerNorm(None, None, EPS)(x_TD), layer_normed(x_TD))


def test_head_norms_take_queries_and_keys_apart() -> None:
    qk_TKH, q_gain_H, k_gain_H = random(3, 6, 8), random(8, seed=1), random(8, seed=2)
    got_TKH = HeadNorms(RmsNorm(q_gain_H, EPS), RmsNorm(k_gain_H, EPS), num_heads=4)(qk_TKH)
    check(got_TKH[:, :4], rms_normed(qk_TKH[:, :4], q_gain_H))
    check(got_TKH[:, 4:], rms_normed(qk_TKH[:, 4:], k_gain_H))


@pytest.mark.parametrize("biased", [False, True])
def test_gated_mlp(biased: bool) -> None:
    x_TD, gate, up, down = random(3, 8), random(5, 8, seed=1), random(5, 8, seed=2), random(8, 5, seed=3)
    gate_up_bias, down_bias = (random(10, seed=4), random(8, seed=5)) if biased else (torch.zeros(10), torch.zeros(8))
    gate_TI, up_TI = x_TD @ gate.T + gate_up_bias[:5], x_TD @ up.T + gate_up_bias[5:]
    expected_TD = (gate_TI * torch.sigmoid(gate_TI) * up_TI) @ down.T + down_bias
    biases = (gate_up_bias, down_bias) if biased else (None, None)
    check(GatedMlp(torch.cat((gate, up)), biases[0], down, biases[1])(x_TD), expected_TD)


def relu(x: Tensor) -> Tensor:
    return x.clamp(min=0)


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / 2**0.5)) / 2


@pytest.mark.parametrize(("name", "activation"), [("relu", relu), ("gelu", gelu)])
def test_plain_mlp(name: str, activation: Transform) -> None:
    x_TD, up, up_bias = random(3, 8), random(5, 8, seed=1), random(5, seed=2)
    down, down_bias = random(8, 5, seed=3), random(8, seed=4)
    expected_TD = activation(x_TD @ up.T + up_bias) @ down.T + down_bias
    check(PlainMlp(up, up_bias, ACTIVATIONS[name], down, down_bias)(x_TD), expected_TD)


def test_sequential_runs_the_mlp_on_what_attention_made() -> None:
    hidden_TD, attended_TD = random(3, 8), random(3, 8, seed=1)
    sum_TD = hidden_TD + attended_TD
    check(Sequential(double, torch.square)(hidden_TD, attended_TD), sum_TD + (2 * sum_TD) ** 2)


def test_parallel_runs_the_mlp_on_what_came_in() -> None:
    hidden_TD, attended_TD = random(3, 8), random(3, 8, seed=1)
    expected_TD = hidden_TD + attended_TD + (2 * hidden_TD) ** 2
    check(Parallel(double, torch.square)(hidden_TD, attended_TD), expected_TD)


def test_post_norm_norms_each_sum() -> None:
    hidden_TD, attended_TD = random(3, 8), random(3, 8, seed=1)
    first_TD = 2 * (hidden_TD + attended_TD)
    check(PostNorm(double, torch.square, triple)(hidden_TD, attended_TD), 3 * (first_TD + first_TD**2))


@pytest.mark.parametrize(
    "tail", [Sequential(double, triple), Parallel(double, triple), PostNorm(double, triple, double)]
)
def test_tails_leave_what_they_are_given_as_it_was(tail: Sequential | Parallel | PostNorm) -> None:
    hidden_TD, attended_TD = random(3, 8), random(3, 8, seed=1)
    tail(hidden_TD, attended_TD)
    assert torch.equal(hidden_TD, random(3, 8))
    assert torch.equal(attended_TD, random(3, 8, seed=1))


def test_the_piece_that_is_not_there_is_the_tensor_itself() -> None:
    x_TD = random(3, 8)
    assert unchanged(x_TD) is x_TD
