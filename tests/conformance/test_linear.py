"""One suite for all linear layers: torch's, ours in C++, and both by the number of rows."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from baton.errors import ModelError
from baton.modeling.forward.linear import Linear, LinearByRows, PanelLinear, TorchLinear, make_linear
from baton.modeling.forward.norms import LayerNorm, RmsNorm, Transform, unchanged
from baton.modeling.kernels import native
from baton.modeling.kernels.products import DOT, TILES, WIDENED
from tests.support.kernels.paths import INSTRUCTION_SETS, has_tiles, lane, require


@dataclass(frozen=True)
class Case:
    """A way to make a linear layer of a weight."""

    instruction_set: str | None
    """Ours, built for it; None: torch's."""
    int8: bool = False
    product: str = WIDENED
    many_rows: int | None = None
    """From how many rows on torch's; None: never."""

    def __call__(self, weight_NK: Tensor, bias_N: Tensor | None = None, gated: bool = False) -> Linear:
        if self.instruction_set is None:
            return TorchLinear(weight_NK, bias_N, gated)
        require(self.instruction_set)
        ours = PanelLinear(
            weight_NK, bias_N, gated, int8=self.int8, product=self.product, instruction_set=self.instruction_set
        )
        if self.many_rows is None:
            return ours
        return LinearByRows(ours, TorchLinear(weight_NK, bias_N, gated), self.many_rows)

    def __str__(self) -> str:
        return f"{self.instruction_set or 'torch'}-{self.product}-{'int8' if self.int8 else 'bf16'}"


needs_tiles = pytest.mark.skipif(not has_tiles(), reason="needs AMX")
WAYS = [*((each, WIDENED) for each in INSTRUCTION_SETS), (native.NATIVE, DOT), ("generic", DOT)]
OURS = [
    pytest.param(Case(each, int8, product), id=str(Case(each, int8, product)), marks=lane(each))
    for each, product in WAYS
    for int8 in (False, True)
] + [
    pytest.param(each, id=str(each), marks=needs_tiles)
    for each in (Case(native.NATIVE, int8, TILES) for int8 in (False, True))
]
BY_ROWS = Case(native.NATIVE, many_rows=13)
ALL = [pytest.param(Case(None), id="torch"), pytest.param(BY_ROWS, id="by_rows"), *OURS]
ROUNDING = 2.0**-8
"""Largest error of rounding a number of size 1 to bf16."""


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def reference(
    x_TK: Tensor,
    linear: Linear,
    *,
    gated: bool = False,
    norm: Transform = unchanged,
    residual_TN: Tensor | None = None,
) -> Tensor:
    """In float64, nothing rounded on the way."""
    weight_NK, bias_N = linear.weight(), linear.bias()
    if isinstance(norm, RmsNorm):
        norm = RmsNorm(norm.gain_D.double(), norm.eps)
    out_TN = norm(x_TK.double()) @ weight_NK.double().T
    if bias_N is not None:
        out_TN += bias_N.double()
    if gated:
        gate_TI, up_TI = out_TN.chunk(2, dim=-1)
        out_TN = gate_TI * torch.sigmoid(gate_TI) * up_TI
    return out_TN if residual_TN is None else out_TN + residual_TN.double()


def check(got: Tensor, expected: Tensor) -> None:
    """Within a few roundings of what may have been rounded on the way, whose sizes are about the result's."""
    assert got.dtype == torch.bfloat16
    scale = expected.abs().amax(-1, keepdim=True)
    assert ((got.double() - expected).abs() <= 3 * ROUNDING * scale + 1e-24).all()


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 12, 13, 17, 24, 31, 33, 385])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(96, 64), (40, 24), (16, 16), (130, 100), (1, 3)])
def test_products_and_bias(make: Case, num_tokens: int, num_outputs: int, num_inputs: int) -> None:
    x_TK, weight_NK = random(num_tokens, num_inputs), random(num_outputs, num_inputs, seed=1)
    bias_N = random(num_outputs, seed=2)
    for bias in (None, bias_N):
        linear = make(weight_NK, bias, False)
        check(linear(x_TK), reference(x_TK, linear))


@pytest.mark.parametrize("make", ALL)
def test_more_rows_than_are_packed_at_a_time(make: Case) -> None:
    """A pass packs 8 MB at most: these rows take two, of several parts, whose last panels and rows are not whole."""
    x_TK, weight_NK = random(771, 7000), random(130, 7000, seed=1, scale=0.01)
    linear = make(weight_NK)
    check(linear(x_TK), reference(x_TK, linear))
    if isinstance(linear, PanelLinear):
        assert torch.equal(linear(x_TK)[700:], linear(x_TK[700:])), "a row depends on no other"


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("num_outputs", [32, 88])
def test_what_stands_around_the_products(
    make: Case, gated: bool, has_residual: bool, normed: bool, num_outputs: int
) -> None:
    num_inputs = 72
    x_TK, weight_NK = random(7, num_inputs, scale=3), random(num_outputs, num_inputs, seed=1, scale=num_inputs**-0.5)
    bias_N = random(num_outputs, seed=2)
    norm = RmsNorm(random(num_inputs, seed=3), 1e-2) if normed else unchanged
    residual_TN = random(7, num_outputs // 2 if gated else num_outputs, seed=4) if has_residual else None
    linear = make(weight_NK, bias_N, gated)
    got_TN = linear(x_TK, norm, residual_TN)
    check(got_TN, reference(x_TK, linear, gated=gated, norm=norm, residual_TN=residual_TN))


@pytest.mark.parametrize("make", ALL)
def test_another_norm_runs_before(make: Case) -> None:
    x_TK, weight_NK = random(5, 64), random(48, 64, seed=1, scale=0.1)
    norm = LayerNorm(random(64, seed=2), random(64, seed=3), 1e-5)
    linear = make(weight_NK)
    check(linear(x_TK, norm), reference(norm(x_TK), linear))


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize(("num_outputs", "gated"), [(96, False), (40, False), (88, True), (64, True)])
def test_the_weight_and_its_rows_are_those_that_were_loaded(make: Case, num_outputs: int, gated: bool) -> None:
    weight_NK = random(num_outputs, 24)
    bias_N = random(num_outputs, seed=1)
    linear = make(weight_NK, bias_N, gated)
    loaded_NK = linear.weight()
    if make.int8:
        # Within half a step, which is a 127th of the largest of a row.
        row_N1 = weight_NK.double().abs().amax(1, keepdim=True)
        assert ((loaded_NK.double() - weight_NK.double()).abs() <= 0.5001 / 127 * row_N1).all()
    else:
        assert torch.equal(loaded_NK, weight_NK)
    got_N = linear.bias()
    assert got_N is not None
    assert torch.equal(got_N, bias_N)
    indices_T = torch.tensor([3, 0, num_outputs - 1, 3])
    assert torch.equal(linear.rows(indices_T), loaded_NK[indices_T].bfloat16())


@pytest.mark.parametrize("make", ALL)
def test_large_gates_neither_overflow_nor_vanish(make: Case) -> None:
    weight_NK = torch.ones(2, 1).bfloat16()
    x_TK = torch.tensor([[-200.0], [-5.0], [0.0], [5.0], [200.0]]).bfloat16()
    linear = make(weight_NK, None, True)
    check(linear(x_TK), reference(x_TK, linear, gated=True))


@pytest.mark.parametrize("make", OURS)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_tokens_result_depends_on_no_other_token_nor_on_threads(make: Case, num_threads: int) -> None:
    weight_NK, x_TK, residual_TN = random(96, 72, seed=1), random(40, 72), random(40, 96, seed=2)
    linear, norm = make(weight_NK), RmsNorm(random(72, seed=3), 1e-5)
    alone_TN = torch.cat([linear(x_TK[t : t + 1], norm, residual_TN[t : t + 1]) for t in range(40)])
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for size in (2, 11, 13, 32, 40):
            assert torch.equal(linear(x_TK[:size], norm, residual_TN[:size]), alone_TN[:size])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("make", ALL)
def test_tokens_need_not_lie_one_behind_the_other(make: Case) -> None:
    weight_NK, wide_TK = random(32, 16, seed=1), random(6, 48)
    x_TK = wide_TK[::2, 16:32]
    assert torch.equal(make(weight_NK)(x_TK), make(weight_NK)(x_TK.contiguous()))


@pytest.mark.parametrize("make", ALL)
def test_rows_of_zeros_make_zeros(make: Case) -> None:
    linear = make(torch.zeros(3, 8).bfloat16())
    assert torch.equal(linear(random(2, 8)), torch.zeros(2, 3).bfloat16())


def test_int8_for_another_dtype_is_refused() -> None:
    with pytest.raises(ModelError, match="weights int8 are not supported for torch.float32 on cpu; choose"):
        make_linear(torch.ones(4, 4), int8=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_torchs(dtype: torch.dtype) -> None:
    assert isinstance(make_linear(torch.ones(4, 4, dtype=dtype)), TorchLinear)
