"""The decode kernel on every path, against the definition of attention in float64: all keys, and picked ones."""

import pytest
import torch
from torch import Tensor

from baton.modeling.kernels.calls.checks import RowKeys
from baton.modeling.kv.buffers import KvRows
from tests.support.kernels.brute_attention import brute_attention
from tests.support.kernels.paths import PATHS, TILED, KernelPath, has_tiles, lane, require

HEADS = [pytest.param((4, 4), id="mha"), pytest.param((9, 3), id="gqa"), pytest.param((14, 2), id="gqa7")]
HEAD_DIMS = (16, 64, 80, 128)
LENGTHS = (1, 2, 17, 64, 65, 700)

pytestmark = pytest.mark.parametrize(
    "path",
    [
        *(pytest.param(each, id=str(each), marks=lane(each.instruction_set)) for each in PATHS),
        pytest.param(TILED, id=str(TILED), marks=pytest.mark.skipif(not has_tiles(), reason="needs AMX")),
    ],
)


@pytest.fixture(autouse=True)
def loaded(path: KernelPath) -> None:
    """The kernel is there: built at its first use."""
    require(path.instruction_set)


def caches(path: KernelPath, num_kv_heads: int, head_dim: int) -> list[Tensor]:
    """KV `[S, 2, G, H]` of a row of each of LENGTHS."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(length, 2, num_kv_heads, head_dim, generator=generator).to(path.dtype) for length in LENGTHS]


def queries(path: KernelPath, num_heads: int, head_dim: int) -> Tensor:
    """A query for each of LENGTHS, as a projection hands them out: a view."""
    generator = torch.Generator().manual_seed(2)
    shape = (len(LENGTHS), num_heads + 2, head_dim)
    return (2 * torch.randn(shape, generator=generator)).to(path.dtype)[:, :num_heads]


def attend(path: KernelPath, q_BNH: Tensor, rows: list[Tensor], *picks: Tensor) -> Tensor:
    """The kernel's answer `[B, N, H]`."""
    addresses_B = torch.tensor([each.data_ptr() for each in rows])
    lengths_B = torch.tensor([each.shape[0] for each in rows])
    keys = RowKeys(addresses_B, lengths_B)
    lists = (picks[0], picks[1]) if picks else None
    return path.operators().decode_attention(q_BNH, keys, rows[0].shape[2], path.product, lists)


def check(path: KernelPath, got_NH: Tensor, expected_NH: Tensor) -> None:
    tolerance = 2e-6 if path.dtype == torch.float32 else 2e-2
    assert got_NH.dtype == path.dtype
    torch.testing.assert_close(got_NH.double(), expected_NH, atol=tolerance, rtol=tolerance)


def lists_of(num_kv_heads: int, seed: int) -> tuple[Tensor, Tensor]:
    """Picks `[B, G, K]` and their numbers `[B, G]`: of each row and kv head another number, in no order; what lies
    behind them is no key at all."""
    generator = torch.Generator().manual_seed(seed)
    picks_BGK = torch.full((len(LENGTHS), num_kv_heads, 600), -1, dtype=torch.int32)
    num_BG = torch.ones(len(LENGTHS), num_kv_heads, dtype=torch.int32)
    for row, length in enumerate(LENGTHS):
        for g in range(num_kv_heads):
            num = (length, length // 2 + 1, 1)[g % 3]
            num_BG[row, g] = num = min(num, 600)
            picks_BGK[row, g, :num] = torch.randperm(length, generator=generator)[:num]
    return picks_BGK, num_BG


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_all_keys(path: KernelPath, head_dim: int, heads: tuple[int, int]) -> None:
    rows, q_BNH = caches(path, heads[1], head_dim), queries(path, heads[0], head_dim)
    o_BNH = attend(path, q_BNH, rows)
    for row, kv in enumerate(rows):
        expected_1NH, _ = brute_attention(q_BNH[row : row + 1], KvRows(kv[:, 0], kv[:, 1], 0), 0, dense=True)
        check(path, o_BNH[row], expected_1NH[0])


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("head_dim", [16, 64])
def test_each_kv_head_reads_only_the_keys_it_picks(path: KernelPath, head_dim: int, heads: tuple[int, int]) -> None:
    num_heads, num_kv_heads = heads
    rows, q_BNH = caches(path, num_kv_heads, head_dim), queries(path, num_heads, head_dim)
    picks_BGK, num_BG = lists_of(num_kv_heads, seed=3)
    chosen = [[picks_BGK[row, g, : num_BG[row, g]].long() for g in range(num_kv_heads)] for row in range(len(rows))]
    for kv, lists in zip(rows, chosen, strict=True):
        for g, keys in enumerate(lists):
            kept = kv[keys, :, g]
            kv[:, :, g] = float("nan")
            kv[keys, :, g] = kept
    o_BNH = attend(path, q_BNH, rows, picks_BGK, num_BG)
    group = num_heads // num_kv_heads
    for row, (kv, lists) in enumerate(zip(rows, chosen, strict=True)):
        for g, keys in enumerate(lists):
            heads_of_g = slice(g * group, (g + 1) * group)
            picked = KvRows(kv[keys, 0, g : g + 1], kv[keys, 1, g : g + 1], 0)
            expected_1RH, _ = brute_attention(q_BNH[row : row + 1, heads_of_g], picked, 0, dense=True)
            check(path, o_BNH[row, heads_of_g], expected_1RH[0])


def test_picking_all_in_order_is_picking_nothing(path: KernelPath) -> None:
    """Bit for bit: keys are taken in the order in which they are listed."""
    rows, q_BNH = caches(path, 3, 64), queries(path, 9, 64)
    picks_BGK = torch.arange(max(LENGTHS), dtype=torch.int32).expand(len(rows), 3, -1).contiguous()
    num_BG = torch.tensor(LENGTHS, dtype=torch.int32).unsqueeze(1).expand(-1, 3).contiguous()
    assert torch.equal(attend(path, q_BNH, rows, picks_BGK, num_BG), attend(path, q_BNH, rows))


@pytest.mark.parametrize(("pick", "num"), [(-1, 1), (2, 1), (0, 0), (0, 5)])
def test_picks_that_no_row_has_are_refused(path: KernelPath, pick: int, num: int) -> None:
    rows, q_BNH = [torch.zeros(2, 2, 1, 16, dtype=path.dtype)], torch.zeros(1, 1, 16, dtype=path.dtype)
    picks_BGK = torch.full((1, 1, 4), pick, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="pick"):
        attend(path, q_BNH, rows, picks_BGK, torch.full((1, 1), num, dtype=torch.int32))


@pytest.mark.parametrize("picked", [False, True])
def test_a_row_does_not_depend_on_the_others(path: KernelPath, picked: bool) -> None:
    """Bit for bit: a token's attention is the same alone and in any batch."""
    rows, q_BNH = caches(path, 3, 64), queries(path, 9, 64)
    picks = lists_of(3, seed=4) if picked else ()
    together_BNH = attend(path, q_BNH, rows, *picks)
    for row, kv in enumerate(rows):
        alone_1NH = attend(path, q_BNH[row : row + 1], [kv], *(each[row : row + 1] for each in picks))
        assert torch.equal(alone_1NH[0], together_BNH[row])


@pytest.mark.parametrize("picked", [False, True])
@pytest.mark.parametrize("part", ["key", "value", "query"])
def test_what_is_no_number_spoils_exactly_what_reads_it(path: KernelPath, part: str, picked: bool) -> None:
    """All but the first row, in the second of three kv heads."""
    rows, q_BNH = caches(path, 3, 64), queries(path, 9, 64)
    for kv in rows[1:]:
        if part != "query":
            kv[kv.shape[0] // 2, int(part == "value"), 1, 3:6] = float("nan")
    if part == "query":
        q_BNH[1:, 3:6, 7] = float("nan")
    picks_BGK = torch.arange(max(LENGTHS), dtype=torch.int32).expand(len(rows), 3, -1).contiguous()
    num_BG = torch.tensor(LENGTHS, dtype=torch.int32).unsqueeze(1).expand(-1, 3).contiguous()
    o_BNH = attend(path, q_BNH, rows, *((picks_BGK, num_BG) if picked else ()))
    spoilt_BNH = torch.zeros(o_BNH.shape, dtype=torch.bool)
    spoilt_BNH[1:, 3:6, 3:6] = True
    if part != "value":
        spoilt_BNH[1:, 3:6] = True
    assert torch.equal(o_BNH.isnan(), spoilt_BNH)
