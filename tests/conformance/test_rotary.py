"""Heads turned in place by the kernel in C++, against complex multiplication in float64."""

import pytest
import torch
from torch import Tensor

from baton.modeling.forward.rope import RotaryTable, has_native_turn
from baton.modeling.kernels import native
from baton.modeling.kernels.calls.operators import Operators
from tests.support.kernels.paths import require, sets
from tests.support.models.tiny_models import random_decoder

CPU = torch.device("cpu")
HEAD_DIMS = (32, 64, 96, 128, 256)
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 2e-2}
SETS = sets()


@pytest.fixture(params=SETS)
def operators(request: pytest.FixtureRequest) -> Operators:
    require(request.param)
    return native.operators(request.param)


def random(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def expected(x_TKH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    """In float64, from the factors as they are; sines are negative in the first half."""
    half = x_TKH.shape[-1] // 2
    pairs = torch.complex(x_TKH[..., :half].double(), x_TKH[..., half:].double())
    turned = pairs * torch.complex(cos_TH[:, :half].double(), sin_TH[:, half:].double()).unsqueeze(1)
    return torch.cat((turned.real, turned.imag), dim=-1)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_heads_are_turned_by_their_tokens_angles_and_nothing_else_is(
    operators: Operators, dtype: torch.dtype, head_dim: int
) -> None:
    num_tokens, num_turned, num_heads = 700, 4, 6
    fused = random(num_tokens, num_heads, head_dim, seed=1, dtype=dtype)  # as projections come: values behind keys
    before = fused.clone()
    angles_TF = 20 * random(num_tokens, head_dim // 2, seed=2, dtype=torch.float32)
    cos_TH = angles_TF.cos().repeat(1, 2).to(dtype)
    sin_TH = torch.cat((-angles_TF.sin(), angles_TF.sin()), dim=1).to(dtype)
    operators.turn_heads(fused[:, :num_turned], cos_TH, sin_TH)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(
        fused[:, :num_turned].double(),
        expected(before[:, :num_turned], cos_TH, sin_TH),
        atol=tolerance,
        rtol=tolerance,
    )
    assert torch.equal(fused[:, num_turned:], before[:, num_turned:])


@pytest.mark.parametrize("num_tokens", [0, 1, 33])
def test_a_tokens_result_depends_on_no_other_token(operators: Operators, num_tokens: int) -> None:
    x_TKH = random(num_tokens, 3, 64, seed=3, dtype=torch.bfloat16)
    cos_TH, sin_TH = (random(num_tokens, 64, seed=seed, dtype=torch.bfloat16) for seed in (4, 5))
    together = x_TKH.clone()
    operators.turn_heads(together, cos_TH, sin_TH)
    for token in range(num_tokens):
        alone = x_TKH[token : token + 1].clone()
        operators.turn_heads(alone, cos_TH[token : token + 1], sin_TH[token : token + 1])
        assert torch.equal(alone[0], together[token])


def test_bad_arguments_are_refused(operators: Operators) -> None:
    x_TKH, factors_TH = torch.zeros(2, 3, 64), torch.zeros(2, 64)
    with pytest.raises(RuntimeError, match="bfloat16 or float32"):
        operators.turn_heads(x_TKH.double(), factors_TH, factors_TH)
    with pytest.raises(RuntimeError, match="not a multiple"):
        operators.turn_heads(torch.zeros(2, 3, 36), torch.zeros(2, 36), torch.zeros(2, 36))
    with pytest.raises(RuntimeError, match="cosines and sines"):
        operators.turn_heads(x_TKH, factors_TH[:1], factors_TH)
    with pytest.raises(RuntimeError, match="cosines and sines"):
        operators.turn_heads(x_TKH, factors_TH, factors_TH.bfloat16())


@pytest.mark.skipif(not native.load(), reason="needs a C++ compiler")
@pytest.mark.parametrize(("head_dim", "in_place"), [(64, True), (16, False)])
def test_the_table_turns_in_place_where_the_kernel_can(head_dim: int, in_place: bool) -> None:
    assert has_native_turn(CPU, torch.float32, head_dim) == in_place
    assert not has_native_turn(CPU, torch.float64, head_dim)
    table = RotaryTable(random_decoder(head_dim=head_dim).config, CPU, torch.float32)
    rotation = table.lookup(torch.tensor([0, 5]))
    x_TNH = random(2, 3, head_dim, seed=6, dtype=torch.float32)
    wanted = expected(x_TNH, rotation.cos_T1H.squeeze(1), rotation.sin_T1H.squeeze(1))
    turned_TNH = rotation.turn(x_TNH, 0)
    assert (turned_TNH is x_TNH) == in_place
    torch.testing.assert_close(turned_TNH.double(), wanted, atol=1e-6, rtol=1e-6)
