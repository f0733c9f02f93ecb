"""One suite for every attention kernel, against the definition of attention in float64."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from baton.modeling.forward.attention import Kernel, Partial, cpu_flash_kernel, native_kernel, plain_kernel
from baton.modeling.forward.triton.attention import triton_kernel
from baton.modeling.kernels import native
from baton.modeling.kv.buffers import KvRows
from tests.support.kernels.brute_attention import brute_attention
from tests.support.kernels.paths import PATHS, TILED, KernelPath, has_tiles, lane, require
from tests.support.kernels.segments import attend


@dataclass(frozen=True)
class Case:
    """A kernel, where it runs, and in which dtype."""

    kernel: Kernel
    device: str
    dtype: torch.dtype
    instruction_set: str | None = None
    """Instruction set of a kernel in C++."""

    @property
    def tolerance(self) -> float:
        return 2e-6 if self.dtype == torch.float32 else 2e-2


NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def kernel_on(path: KernelPath) -> Kernel:
    """Ours in C++, on one of its paths, for one query as for many."""

    def kernel(q_TNH: Tensor, pieces: Sequence[KvRows], causal: bool, mask_TS: Tensor | None) -> Partial:
        if mask_TS is not None:
            return cpu_flash_kernel(q_TNH, pieces, causal, mask_TS)
        keys, values = [each.k_SGH for each in pieces], [each.v_SGH for each in pieces]
        o_TNH, lse_TN = path.operators().prefill_attention(q_TNH, keys, values, causal, path.product)
        return o_TNH, lse_TN

    return kernel


CASES = [
    pytest.param(Case(cpu_flash_kernel, "cpu", torch.float32), id="flash-cpu-float32"),
    pytest.param(Case(cpu_flash_kernel, "cpu", torch.bfloat16), id="flash-cpu-bfloat16"),
    pytest.param(Case(native_kernel, "cpu", torch.float32, native.NATIVE), id="native-cpu-float32"),
    pytest.param(Case(native_kernel, "cpu", torch.bfloat16, native.NATIVE), id="native-cpu-bfloat16"),
    *(
        pytest.param(
            Case(kernel_on(each), "cpu", each.dtype, each.instruction_set),
            id=str(each),
            marks=lane(each.instruction_set),
        )
        for each in PATHS
    ),
    pytest.param(
        Case(kernel_on(TILED), "cpu", TILED.dtype, TILED.instruction_set),
        id=str(TILED),
        marks=pytest.mark.skipif(not has_tiles(), reason="needs AMX"),
    ),
    pytest.param(Case(plain_kernel, "cpu", torch.float32), id="plain-cpu-float32"),
    pytest.param(Case(plain_kernel, "cpu", torch.bfloat16), id="plain-cpu-bfloat16"),
    pytest.param(Case(plain_kernel, "cuda", torch.float32), id="plain-cuda-float32", marks=NEEDS_CUDA),
    pytest.param(Case(plain_kernel, "cuda", torch.bfloat16), id="plain-cuda-bfloat16", marks=NEEDS_CUDA),
    pytest.param(Case(triton_kernel, "cuda", torch.float32), id="triton-cuda-float32", marks=NEEDS_CUDA),
    pytest.param(Case(triton_kernel, "cuda", torch.bfloat16), id="triton-cuda-bfloat16", marks=NEEDS_CUDA),
]
HEADS = [pytest.param((4, 4), id="mha"), pytest.param((6, 2), id="gqa"), pytest.param((4, 1), id="mqa")]
HEAD_DIM = 16

pytestmark = pytest.mark.parametrize("case", CASES)


@pytest.fixture(autouse=True)
def loaded(case: Case) -> None:
    """The kernel is there: built at its first use."""
    if case.instruction_set:
        require(case.instruction_set)


def queries(case: Case, num_queries: int, num_heads: int, head_dim: int = HEAD_DIM) -> Tensor:
    """Random queries, large enough that attention is far from uniform."""
    generator = torch.Generator().manual_seed(1)
    return (2.0 * torch.randn(num_queries, num_heads, head_dim, generator=generator)).to(case.device, case.dtype)


def cached(case: Case, num_keys: int, num_kv_heads: int, first_position: int = 0, head_dim: int = HEAD_DIM) -> KvRows:
    """Rows as a KvBuffer hands them out: K and V interleaved token by token, so neither is contiguous."""
    generator = torch.Generator().manual_seed(2)
    data_S2GH = torch.randn(num_keys, 2, num_kv_heads, head_dim, generator=generator).to(case.device, case.dtype)
    rows = KvRows(data_S2GH[:, 0], data_S2GH[:, 1], first_position)
    assert not rows.k_SGH.is_contiguous() or num_keys <= 1
    return rows


def check(case: Case, got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Outputs in the queries' dtype and log-sum-exps in fp32, both close to the definition's."""
    (o_TNH, lse_TN), (expected_o_TNH, expected_lse_TN) = got, expected
    assert o_TNH.dtype == case.dtype
    assert lse_TN.dtype == torch.float32
    torch.testing.assert_close(o_TNH.cpu().double(), expected_o_TNH, atol=case.tolerance, rtol=case.tolerance)
    torch.testing.assert_close(lse_TN.cpu().double(), expected_lse_TN, atol=case.tolerance, rtol=case.tolerance)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 77), (5, 1), (5, 77), (40, 40), (513, 3)])
def test_dense(case: Case, heads: tuple[int, int], num_queries: int, num_keys: int) -> None:
    q_TNH, rows = queries(case, num_queries, heads[0]), cached(case, num_keys, heads[1])
    check(case, case.kernel(q_TNH, [rows], False, None), brute_attention(q_TNH, rows, 0, dense=True))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("num_tokens", [1, 2, 33, 530])
def test_square_causal(case: Case, heads: tuple[int, int], num_tokens: int) -> None:
    q_TNH, rows = queries(case, num_tokens, heads[0]), cached(case, num_tokens, heads[1])
    check(case, case.kernel(q_TNH, [rows], True, None), brute_attention(q_TNH, rows, 0))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("num_queries", [2, 40, 300])
def test_pieces_are_one_sequence(case: Case, heads: tuple[int, int], causal: bool, num_queries: int) -> None:
    q_TNH, rows = queries(case, num_queries, heads[0]), cached(case, 311 + num_queries, heads[1])
    pieces = cut(rows, 128, 256, 257, 311)
    expected = brute_attention(q_TNH, rows, 311, dense=not causal)
    check(case, case.kernel(q_TNH, pieces, causal, None), expected)


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 112, 128, 256])
def test_head_dims(case: Case, head_dim: int) -> None:
    q_TNH, rows = queries(case, 140, 6, head_dim) / 2, cached(case, 140, 2, head_dim=head_dim)
    check(case, case.kernel(q_TNH, [rows], True, None), brute_attention(q_TNH, rows, 0))
    check(case, case.kernel(q_TNH[:7], [rows], False, None), brute_attention(q_TNH[:7], rows, 0, dense=True))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("first_query", [0, 7])
def test_masked(case: Case, heads: tuple[int, int], first_query: int) -> None:
    q_TNH, rows = queries(case, 20, heads[0]), cached(case, 25, heads[1])
    q_T1 = torch.arange(first_query, first_query + 20).unsqueeze(1)
    k_S = torch.arange(25)
    mask_TS = ((k_S <= q_T1) & (k_S > q_T1 - 6)).to(case.device)
    check(case, case.kernel(q_TNH, [rows], False, mask_TS), brute_attention(q_TNH, rows, first_query, window=6))


@pytest.mark.parametrize("heads", HEADS)
def test_queries_may_be_strided_views(case: Case, heads: tuple[int, int]) -> None:
    fused = queries(case, 9, heads[0] + 3)
    q_TNH, rows = fused[:, : heads[0]], cached(case, 9, heads[1])
    check(case, case.kernel(q_TNH, [rows], True, None), brute_attention(q_TNH, rows, 0))


def test_one_strided_query(case: Case) -> None:
    q_TNH, rows = queries(case, 1, 9)[:, 1:7], cached(case, 50, 2)
    check(case, case.kernel(q_TNH, [rows], False, None), brute_attention(q_TNH, rows, 0, dense=True))


def test_large_scores_do_not_overflow(case: Case) -> None:
    q_TNH, rows = queries(case, 8, 4) * 100, cached(case, 8, 2)
    o_TNH, lse_TN = case.kernel(q_TNH, [rows], True, None)
    expected_o_TNH, expected_lse_TN = brute_attention(q_TNH, rows, 0)
    torch.testing.assert_close(o_TNH.cpu().double(), expected_o_TNH, atol=1e-3, rtol=2e-2)
    torch.testing.assert_close(lse_TN.cpu().double(), expected_lse_TN, atol=1e-3, rtol=1e-2)


def cut(rows: KvRows, *positions: int) -> list[KvRows]:
    """The rows cut at absolute positions."""
    edges = [rows.first_position, *positions, rows.end_position]
    return [rows.slice(start, end) for start, end in pairwise(edges)]


ORDERS: list[Callable[[list[KvRows]], list[KvRows]]] = [
    lambda parts: parts,
    lambda parts: parts[::-1],
    lambda parts: parts[1:] + parts[:1],
    lambda parts: parts[::2] + parts[1::2],
]


@pytest.mark.parametrize("order", ORDERS, ids=["ascending", "descending", "rotated", "even-odd"])
@pytest.mark.parametrize("window", [None, 1, 5, 30, 1000])
@pytest.mark.parametrize(("first_query", "num_queries"), [(0, 60), (23, 37), (59, 1), (40, 6)])
def test_segments_in_any_order(
    case: Case,
    order: Callable[[list[KvRows]], list[KvRows]],
    window: int | None,
    first_query: int,
    num_queries: int,
) -> None:
    q_TNH, rows = queries(case, num_queries, 6), cached(case, first_query + num_queries, 2)
    segments = order(cut(rows, *(edge for edge in (3, 23, 24, 45) if edge < rows.end_position)))
    o_TNH = attend(q_TNH, first_query, segments, window, case.kernel)
    expected_o_TNH, _ = brute_attention(q_TNH, rows, first_query, window)
    torch.testing.assert_close(o_TNH.cpu().double(), expected_o_TNH, atol=case.tolerance, rtol=case.tolerance)


@pytest.mark.parametrize("window", [None, 1, 5, 30])
@pytest.mark.parametrize(("first_query", "num_queries"), [(0, 12), (40, 1), (40, 7), (20, 50)])
def test_poison_outside_the_visible_range_never_surfaces(
    case: Case, window: int | None, first_query: int, num_queries: int
) -> None:
    q_TNH, rows = queries(case, num_queries, 4), cached(case, 100, 2)
    expected_o_TNH, _ = brute_attention(q_TNH, rows, first_query, window)
    first_visible = 0 if window is None else max(first_query - window + 1, 0)
    for tensor in (rows.k_SGH, rows.v_SGH):
        tensor[:first_visible] = float("nan")
        tensor[first_query + num_queries :] = float("nan")
    o_TNH = attend(q_TNH, first_query, cut(rows, 30, 31, 80), window, case.kernel)
    torch.testing.assert_close(o_TNH.cpu().double(), expected_o_TNH, atol=case.tolerance, rtol=case.tolerance)


NAN = float("nan")


@pytest.mark.parametrize("num_keys", [20, 300])
@pytest.mark.parametrize("bad", [0, 7, 19])
def test_a_key_that_is_no_number_spoils_those_who_see_it(case: Case, num_keys: int, bad: int) -> None:
    q_TNH, rows = queries(case, num_keys, 4), cached(case, num_keys, 2)
    rows.k_SGH[bad, 0, 3] = NAN
    if case.dtype == torch.float32:
        rows.k_SGH.view(torch.int32)[bad, 0, 3] |= 1  # another NaN
    o_TNH, lse_TN = case.kernel(q_TNH, [rows], True, None)
    spoilt_TN = torch.zeros(num_keys, 4, dtype=torch.bool, device=case.device)
    spoilt_TN[bad:, :2] = True
    assert torch.equal(o_TNH.isnan().all(-1), spoilt_TN) and torch.equal(o_TNH.isnan().any(-1), spoilt_TN)
    assert torch.equal(lse_TN.isnan(), spoilt_TN)
    o_TNH, _ = case.kernel(q_TNH, [rows], False, None)
    assert o_TNH[:, :2].isnan().all() and not o_TNH[:, 2:].isnan().any()


def test_a_value_that_is_no_number_spoils_its_channel(case: Case) -> None:
    q_TNH, rows = queries(case, 30, 4), cached(case, 200, 2)
    rows.v_SGH[150, 1, 5] = NAN
    o_TNH, lse_TN = case.kernel(q_TNH, [rows], False, None)
    assert o_TNH[:, 2:, 5].isnan().all() and int(o_TNH.isnan().sum()) == 30 * 2
    assert not lse_TN.isnan().any()


def test_a_query_that_is_no_number_spoils_its_row(case: Case) -> None:
    q_TNH, rows = queries(case, 200, 4), cached(case, 200, 2)
    q_TNH[77, 1, 3] = NAN
    for causal in (False, True):
        o_TNH, lse_TN = case.kernel(q_TNH, [rows], causal, None)
        assert o_TNH[77, 1].isnan().all() and int(o_TNH.isnan().sum()) == HEAD_DIM
        assert int(lse_TN.isnan().sum()) == 1


@pytest.mark.parametrize(
    ("keys", "values", "text"),
    [
        ((5, 2, 16), (4, 2, 16), "one shape"),
        ((5, 2, 32), (5, 2, 32), "one dim"),
        ((5, 3, 16), (5, 3, 16), "do not share"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    case: Case, keys: tuple[int, ...], values: tuple[int, ...], text: str
) -> None:
    if case.instruction_set is None:
        pytest.skip("torch's own checks")
    rows = KvRows(torch.zeros(keys, dtype=case.dtype), torch.zeros(values, dtype=case.dtype), 0)
    with pytest.raises(RuntimeError, match=text):
        case.kernel(queries(case, 5, 4), [rows], False, None)


def test_sequence_may_begin_behind_position_zero(case: Case) -> None:
    q_TNH, rows = queries(case, 6, 4), cached(case, 16, 2, first_position=100)
    o_TNH = attend(q_TNH, 110, cut(rows, 105, 113), None, case.kernel)
    expected_o_TNH, _ = brute_attention(q_TNH, rows, 110)
    torch.testing.assert_close(o_TNH.cpu().double(), expected_o_TNH, atol=case.tolerance, rtol=case.tolerance)
