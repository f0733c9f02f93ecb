"""Partial keys by torch and by the kernel on every path, of keys as they lie at home: what the basis makes of them, and
where it is kept."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from baton.modeling.forward.selection import KeyProjection, PartialKeys
from baton.modeling.kernels import native
from baton.modeling.kernels.calls.operators import Operators
from baton.types import TokenRange
from tests.support.kernels.paths import require, sets

NUM_KV_HEADS = 3
TORCH = "torch"
DTYPES = [torch.bfloat16, torch.float32]
RUNS = [(0, 1), (0, 16), (5, 11), (5, 12), (15, 2), (16, 40), (3, 70)]
"""`(first, count)`: within a block, up to its end, and across."""
Write = Callable[[PartialKeys, int, Tensor, KeyProjection], None]
"""(keys, first, k_TGH, projection): as PartialKeys.write, in layer 1."""
SETS = sets()


@pytest.fixture(params=[TORCH, *SETS])
def write(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Write:
    if request.param == TORCH:
        monkeypatch.setattr(native, "load", lambda: False)
        return lambda keys, first, k_TGH, projection: keys.write(1, first, k_TGH, projection)
    operators = loaded(request.param)

    def by_kernel(keys: PartialKeys, first: int, k_TGH: Tensor, projection: KeyProjection) -> None:
        keys.commit(TokenRange(first, first + len(k_TGH)), 1)
        basis = projection.basis_GHR, projection.columns_GR
        operators.project_keys(k_TGH, *basis, torch.tensor([keys.address(1)]), torch.tensor([first]))

    return by_kernel


def loaded(instruction_set: str) -> Operators:
    require(instruction_set)
    return native.operators(instruction_set)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def whole_numbers(*shape: int, seed: int) -> Tensor:
    """Whole numbers so small that every sum is exact in fp32, and not all are in bf16."""
    return torch.randint(-15, 16, shape, generator=torch.Generator().manual_seed(seed)).float()


def at_home(k_TGH: Tensor, dtype: torch.dtype) -> Tensor:
    """A view of the keys beside values that are no numbers, as a slot holds them."""
    kv_T2GH = torch.full((len(k_TGH), 2, *k_TGH.shape[1:]), math.nan, dtype=dtype)
    kv_T2GH[:, 0] = k_TGH
    return kv_T2GH[:, 0]


def some_columns(head_dim: int, num_columns: int) -> KeyProjection:
    """Each kv head's own."""
    columns_GR = random(NUM_KV_HEADS, head_dim, seed=1).argsort(1)[:, :num_columns].contiguous()
    basis_GHR = torch.zeros(NUM_KV_HEADS, head_dim, num_columns).scatter_(1, columns_GR.unsqueeze(1), 1.0)
    return KeyProjection(basis_GHR, columns_GR)


def empty(num_columns: int, num_tokens: int = 96) -> PartialKeys:
    keys = PartialKeys(range(3), NUM_KV_HEADS, num_columns, num_tokens)
    keys.commit(TokenRange(0, num_tokens))
    return keys


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 16, 37, 64])
@pytest.mark.parametrize("num_columns", [1, 3, 8, 12, 20, 37])
def test_products_are_those_of_the_definition(
    write: Write, num_columns: int, head_dim: int, dtype: torch.dtype
) -> None:
    """Rounded once, all sums being exact."""
    k_TGH = whole_numbers(37, NUM_KV_HEADS, head_dim, seed=1)
    wide_GHX = whole_numbers(NUM_KV_HEADS, head_dim, num_columns + 3, seed=2)
    keys = empty(num_columns)
    write(keys, 0, at_home(k_TGH, dtype), KeyProjection(wide_GHX[..., :num_columns], None))
    expected_TGR = torch.einsum("tgh,ghr->tgr", k_TGH.double(), wide_GHX[..., :num_columns].double())
    assert torch.equal(keys.read(1, 37), expected_TGR.bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_any_numbers_are_as_right_as_fp32_and_one_rounding(write: Write, dtype: torch.dtype) -> None:
    k_TGH, basis_GHR = at_home(random(90, NUM_KV_HEADS, 64, seed=1), dtype), random(NUM_KV_HEADS, 64, 20, seed=2)
    keys = empty(20)
    write(keys, 0, k_TGH, KeyProjection(basis_GHR, None))
    true_TGR = torch.einsum("tgh,ghr->tgr", k_TGH.double(), basis_GHR.double())
    most_TGR = torch.einsum("tgh,ghr->tgr", k_TGH.double().abs(), basis_GHR.double().abs())
    assert ((keys.read(1, 90) - true_TGR).abs() <= 2**-8 * true_TGR.abs() + 64 * 2**-24 * most_TGR).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 37, 64])
@pytest.mark.parametrize("num_columns", [1, 8])
def test_selected_columns_are_the_keys_own(write: Write, num_columns: int, head_dim: int, dtype: torch.dtype) -> None:
    """Rounded once; what is no number shows in its column, and nowhere else."""
    projection = some_columns(head_dim, num_columns)
    assert projection.columns_GR is not None
    k_TGH = at_home(random(37, NUM_KV_HEADS, head_dim, seed=3), dtype)
    k_TGH[7, 1, projection.columns_GR[1, 0]] = math.nan
    k_TGH[8, 2] = math.nan
    k_TGH[8, 2, projection.columns_GR[2]] = math.inf
    keys = empty(num_columns)
    write(keys, 0, k_TGH, projection)
    expected_TGR = torch.stack([k_TGH[:, g, projection.columns_GR[g]] for g in range(NUM_KV_HEADS)], dim=1).bfloat16()
    torch.testing.assert_close(keys.read(1, 37), expected_TGR, rtol=0, atol=0, equal_nan=True)
    assert int(keys.read(1, 37).isnan().sum()) == 1


def test_what_is_no_number_spoils_its_own_products(write: Write) -> None:
    k_TGH = random(37, NUM_KV_HEADS, 16, seed=1)
    k_TGH[20, 1, 3] = math.nan
    keys = empty(5)
    write(keys, 0, k_TGH, KeyProjection(random(NUM_KV_HEADS, 16, 5, seed=2), None))
    is_spoilt_TG = keys.read(1, 37).isnan().all(2)
    assert is_spoilt_TG.nonzero().tolist() == [[20, 1]]
    assert int(keys.read(1, 37).isnan().sum()) == 5


@pytest.mark.parametrize("selects", [True, False], ids=["columns", "product"])
@pytest.mark.parametrize(("first", "count"), RUNS)
def test_tokens_are_kept_where_they_belong_and_nowhere_else(
    write: Write, first: int, count: int, selects: bool
) -> None:
    columns = some_columns(16, 5)
    keys, k_TGH = empty(5), whole_numbers(count, NUM_KV_HEADS, 16, seed=count)
    for layer in keys.layers:
        keys.write(layer, 0, torch.full((96, NUM_KV_HEADS, 5), 300.0 + layer))
    write(keys, first, k_TGH, columns if selects else KeyProjection(columns.basis_GHR, None))
    expected_SGR = torch.full((96, NUM_KV_HEADS, 5), 301.0)
    expected_SGR[first : first + count] = columns.apply(k_TGH)
    assert torch.equal(keys.read(1, 96), expected_SGR.bfloat16())
    assert [set(keys.read(layer, 96).flatten().tolist()) for layer in (0, 2)] == [{300.0}, {302.0}]


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("num_rows", [2, 15, 16, 33])
def test_rows_have_a_place_each(num_rows: int, instruction_set: str) -> None:
    operators, projection = loaded(instruction_set), some_columns(16, 5)
    rows = [empty(5) for _ in range(num_rows)]
    k_BGH = random(num_rows, NUM_KV_HEADS, 16, seed=1)
    places_B = torch.arange(num_rows) * 7 % 96
    addresses_B = torch.tensor([keys.address(1) for keys in rows])
    operators.project_keys(k_BGH, projection.basis_GHR, projection.columns_GR, addresses_B, places_B)
    for keys, place, k_GR in zip(rows, places_B.tolist(), projection.apply(k_BGH), strict=True):
        expected_SGR = torch.zeros(96, NUM_KV_HEADS, 5)
        expected_SGR[place] = k_GR
        assert torch.equal(keys.read(1, 96), expected_SGR.bfloat16())


@pytest.mark.parametrize("instruction_set", SETS)
def test_bad_arguments_are_refused(instruction_set: str) -> None:
    project = loaded(instruction_set).project_keys
    k_TGH, basis_GHR, one = torch.zeros(2, 3, 8), torch.zeros(3, 8, 5), torch.ones(1, dtype=torch.int64)
    columns_GR = torch.zeros(3, 5, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="bfloat16 or float32"):
        project(k_TGH.half(), basis_GHR, None, one, one)
    with pytest.raises(RuntimeError, match="in one piece"):
        project(torch.zeros(2, 3, 16)[..., ::2], basis_GHR, None, one, one)
    for basis in (basis_GHR[:2], basis_GHR[:, :7], basis_GHR.bfloat16(), basis_GHR.transpose(1, 2)):
        with pytest.raises(RuntimeError, match=r"a basis must be \[G, H, R\]"):
            project(k_TGH, basis, None, one, one)
    for columns in (columns_GR[:2], columns_GR[:, :4], columns_GR.int()):
        with pytest.raises(RuntimeError, match="a column for each"):
            project(k_TGH, basis_GHR, columns, one, one)
    for column in (-1, 8):
        with pytest.raises(RuntimeError, match="no head has such a column"):
            project(k_TGH, basis_GHR, columns_GR + column, one, one)
    for addresses, numbers in ((one, one.int()), (one.repeat(2), one), (one.repeat(3), one.repeat(3))):
        with pytest.raises(RuntimeError, match="an address and a number"):
            project(k_TGH, basis_GHR, None, addresses, numbers)
    with pytest.raises(RuntimeError, match="0 or more"):
        project(k_TGH, basis_GHR, None, one, -one)
