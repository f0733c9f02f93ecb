"""The pieces of a layer against their formulas in float64."""

import pytest
import torch
from torch import Tensor

from baton.modeling.forward.layers import (
    ACTIVATIONS,
    ActivatedMlp,
    GatedMlp,
    Mlp,
    Parallel,
    PlainMlp,
    PostNorm,
    SandwichNorm,
    Sequential,
    Tail,
)
from baton.modeling.forward.linear import TorchLinear
from baton.modeling.forward.norms import Transform, unchanged


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)


def check_mlp(mlp: Mlp, x_TD: Tensor, expected_TD: Tensor) -> None:
    """Check the MLP alone, behind a norm, and added to a residual."""
    check(mlp(x_TD), expected_TD)
    check(mlp(x_TD / 2, double), expected_TD)
    check(mlp(x_TD / 2, double, x_TD), x_TD + expected_TD)


def double(x: Tensor) -> Tensor:
    return 2 * x


def triple(x: Tensor) -> Tensor:
    return 3 * x


@pytest.mark.parametrize("biased", [False, True])
def test_gated_mlp(biased: bool) -> None:
    x_TD, gate, up, down = random(3, 8), random(5, 8, seed=1), random(5, 8, seed=2), random(8, 5, seed=3)
    gate_up_bias, down_bias = (random(10, seed=4), random(8, seed=5)) if biased else (torch.zeros(10), torch.zeros(8))
    gate_TI, up_TI = x_TD @ gate.T + gate_up_bias[:5], x_TD @ up.T + gate_up_bias[5:]
    expected_TD = (gate_TI * torch.sigmoid(gate_TI) * up_TI) @ down.T + down_bias
    biases = (gate_up_bias, down_bias) if biased else (None, None)
    mlp = GatedMlp(TorchLinear(torch.cat((gate, up)), biases[0], gated=True), TorchLinear(down, biases[1]))
    check_mlp(mlp, x_TD, expected_TD)


def test_an_mlp_with_another_gate() -> None:
    x_TD, gate, up, down = random(3, 8), random(5, 8, seed=1), random(5, 8, seed=2), random(8, 5, seed=3)
    expected_TD = (relu(x_TD @ gate.T) * (x_TD @ up.T)) @ down.T
    check_mlp(ActivatedMlp(TorchLinear(torch.cat((gate, up))), relu, TorchLinear(down)), x_TD, expected_TD)


def relu(x: Tensor) -> Tensor:
    return x.clamp(min=0)


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / 2**0.5)) / 2


@pytest.mark.parametrize(("name", "activation"), [("relu", relu), ("gelu", gelu)])
def test_plain_mlp(name: str, activation: Transform) -> None:
    x_TD, up, up_bias = random(3, 8), random(5, 8, seed=1), random(5, seed=2)
    down, down_bias = random(8, 5, seed=3), random(8, seed=4)
    expected_TD = activation(x_TD @ up.T + up_bias) @ down.T + down_bias
    mlp = PlainMlp(TorchLinear(up, up_bias), ACTIVATIONS[name], TorchLinear(down, down_bias))
    check_mlp(mlp, x_TD, expected_TD)


OUTPUT = TorchLinear(random(8, 6, seed=9))


def square(x_TD: Tensor, norm: Transform = unchanged, residual_TD: Tensor | None = None) -> Tensor:
    """An MLP."""
    out_TD = norm(x_TD).square()
    return out_TD if residual_TD is None else residual_TD + out_TD


def test_sequential_runs_the_mlp_on_what_attention_made() -> None:
    hidden_TD, attended_TW = random(3, 8), random(3, 6, seed=1)
    sum_TD = hidden_TD + OUTPUT(attended_TW)
    check(Sequential(OUTPUT, double, square)(hidden_TD, attended_TW), sum_TD + (2 * sum_TD) ** 2)


def test_parallel_runs_the_mlp_on_what_came_in() -> None:
    hidden_TD, attended_TW = random(3, 8), random(3, 6, seed=1)
    expected_TD = hidden_TD + OUTPUT(attended_TW) + (2 * hidden_TD) ** 2
    check(Parallel(OUTPUT, double, square)(hidden_TD, attended_TW), expected_TD)


def test_post_norm_norms_each_sum() -> None:
    hidden_TD, attended_TW = random(3, 8), random(3, 6, seed=1)
    first_TD = 2 * (hidden_TD + OUTPUT(attended_TW))
    check(PostNorm(OUTPUT, double, square, triple)(hidden_TD, attended_TW), 3 * (first_TD + first_TD**2))


def test_sandwich_norm_norms_before_and_behind_each_part() -> None:
    hidden_TD, attended_TW = random(3, 8), random(3, 6, seed=1)
    sum_TD = hidden_TD + 2 * OUTPUT(attended_TW)
    tail = SandwichNorm(OUTPUT, double, triple, square, double)
    check(tail(hidden_TD, attended_TW), sum_TD + 2 * (3 * sum_TD) ** 2)


@pytest.mark.parametrize(
    "tail",
    [
        Sequential(OUTPUT, double, square),
        Parallel(OUTPUT, double, square),
        PostNorm(OUTPUT, double, square, double),
        SandwichNorm(OUTPUT, double, double, square, double),
    ],
)
def test_tails_leave_what_they_are_given_as_it_was(tail: Tail) -> None:
    hidden_TD, attended_TW = random(3, 8), random(3, 6, seed=1)
    tail(hidden_TD, attended_TW)
    assert torch.equal(hidden_TD, random(3, 8))
    assert torch.equal(attended_TW, random(3, 6, seed=1))
