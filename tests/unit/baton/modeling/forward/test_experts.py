"""A mixture of experts against its formula, token by token, in both ways to multiply."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.modeling.forward.experts import (
    ExpertProducts,
    ExpertsMlp,
    LinearExperts,
    StackedExperts,
    can_stack,
    mixtures,
)
from baton.modeling.forward.linear import TorchLinear
from baton.modeling.forward.norms import unchanged

NUM_EXPERTS, HIDDEN, INNER, ACTIVE = 5, 16, 8, 2


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


ROUTER_ED = random(NUM_EXPERTS, HIDDEN, seed=1)
GATE_UP_EJD = random(NUM_EXPERTS, 2 * INNER, HIDDEN, seed=2)
DOWN_EDI = random(NUM_EXPERTS, HIDDEN, INNER, seed=3)


def linears() -> ExpertProducts:
    gate_up = tuple(TorchLinear(weight, gated=True) for weight in GATE_UP_EJD)
    return LinearExperts(gate_up, tuple(TorchLinear(weight) for weight in DOWN_EDI))


def stacked() -> ExpertProducts:
    return StackedExperts(GATE_UP_EJD, DOWN_EDI)


def expected(x_TD: Tensor, *, normalised: bool) -> Tensor:
    """Every expert on every token, in float64, and the router's weights of all but its best ones zero."""
    x_TD = x_TD.double()
    weight_TE = (x_TD @ ROUTER_ED.double().T).softmax(-1)
    kept_TA = weight_TE.topk(ACTIVE).indices
    weight_TE = torch.zeros_like(weight_TE).scatter(1, kept_TA, weight_TE.gather(1, kept_TA))
    if normalised:
        weight_TE = weight_TE / weight_TE.sum(1, keepdim=True)
    gate_TEI, up_TEI = torch.einsum("td,ejd->tej", x_TD, GATE_UP_EJD.double()).chunk(2, dim=-1)
    return torch.einsum("tei,edi,te->td", F.silu(gate_TEI) * up_TEI, DOWN_EDI.double(), weight_TE)


@pytest.mark.parametrize("make", [linears, stacked])
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 3, 50])
def test_a_token_is_the_weighted_sum_of_its_experts(make: object, normalised: bool, num_tokens: int) -> None:
    products = linears() if make is linears else stacked()
    mlp, x_TD = ExpertsMlp(TorchLinear(ROUTER_ED), products, ACTIVE, normalised), random(num_tokens, HIDDEN, seed=4)
    wanted_TD = expected(x_TD, normalised=normalised)
    torch.testing.assert_close(mlp(x_TD).double(), wanted_TD, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(mlp(x_TD / 2, lambda x: 2 * x).double(), wanted_TD, atol=2e-5, rtol=1e-5)
    summed_TD = mlp(x_TD, unchanged, x_TD).double()
    torch.testing.assert_close(summed_TD, x_TD.double() + wanted_TD, atol=2e-5, rtol=1e-5)


def test_experts_without_tokens_multiply_nothing() -> None:
    class Counting(TorchLinear):
        calls = 0

        def __call__(self, *arguments: object, **named: object) -> Tensor:
            type(self).calls += 1
            return super().__call__(*arguments, **named)  # type: ignore[arg-type]

    down = tuple(Counting(weight) for weight in DOWN_EDI)
    products = LinearExperts(tuple(TorchLinear(weight, gated=True) for weight in GATE_UP_EJD), down)
    products(random(4, HIDDEN, seed=5), torch.tensor([1, 1, 1, 3]))
    assert Counting.calls == 2


@pytest.mark.parametrize("make", [linears, stacked])
def test_a_token_does_not_depend_on_the_tokens_beside_it(make: object) -> None:
    products = linears() if make is linears else stacked()
    mlp, x_TD = ExpertsMlp(TorchLinear(ROUTER_ED), products, ACTIVE, normalised=True), random(20, HIDDEN, seed=6)
    torch.testing.assert_close(mlp(x_TD)[7:8], mlp(x_TD[7:8]), atol=1e-6, rtol=1e-6)


def test_only_bf16_on_cuda_is_stacked() -> None:
    assert can_stack(torch.device("cuda"), torch.bfloat16)
    assert not can_stack(torch.device("cuda"), torch.float32)
    assert not can_stack(torch.device("cpu"), torch.bfloat16)


def test_other_layers_are_no_mixtures() -> None:
    assert mixtures([object()]) == []
