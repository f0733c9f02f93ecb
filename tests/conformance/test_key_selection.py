"""Which keys rows attend to, by torch and by the kernel on every path, against the definition in plain Python."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.modeling.forward.selection import PartialKeys, PartialRows, Picks, Selection
from baton.modeling.kernels import native
from baton.modeling.kernels.calls.operators import Operators
from tests.support.kernels.paths import require, sets

LAYER = 1
LENGTHS = (1, 2, 15, 16, 17, 64, 65, 300)
HEADS = [pytest.param((4, 4), id="mha"), pytest.param((9, 3), id="gqa"), pytest.param((14, 2), id="gqa7"), (5, 1)]
EVERYTHING = Selection(alpha=math.inf, most_share=1.0, num_first=0, num_last=1)
SELECTIONS = [
    pytest.param(Selection(4.0, 0.2, 4, 16), id="bounded"),
    pytest.param(Selection(2.0, 1.0, 0, 1), id="close"),
    pytest.param(Selection(0.1, 1.0, 0, 1), id="best"),
    pytest.param(Selection(math.inf, 0.3, 2, 3), id="share"),
    pytest.param(Selection(5000.0, 0.9, 0, 1), id="far"),
    pytest.param(Selection(math.inf, 0.1, 2, 3, free_keys=20), id="free"),
    pytest.param(Selection(3.0, 0.1, 2, 3, free_keys=20), id="free and close"),
    pytest.param(EVERYTHING, id="everything"),
]
TORCH = "torch"

Select = Callable[..., Picks]
"""`baton.modeling.forward.selection.PartialRows.select` for LAYER."""


@pytest.fixture(params=[TORCH, *sets()])
def select(request: pytest.FixtureRequest) -> Select:
    if request.param == TORCH:
        return by_torch
    operators = loaded(request.param)

    def by_kernel(
        q_BNR: Tensor,
        rows: PartialRows,
        selection: Selection,
        *,
        has_new: bool = True,
        closeness_BGS: Tensor | None = None,
    ) -> Picks:
        keys = rows.addresses_B(LAYER), rows.lengths_B, rows.tokens_B, int(not has_new)
        num_kv_heads = rows.keys[0].data_LCGRI.shape[2]
        limits = selection.alpha, selection.most_share, selection.free_keys, selection.num_first, selection.num_last
        found = operators.select_keys(q_BNR, keys, num_kv_heads, limits, closeness_BGS=closeness_BGS)
        return Picks(*found)

    return by_kernel


def by_torch(q_BNR: Tensor, rows: PartialRows, selection: Selection, **more: Any) -> Picks:
    return rows.select_plainly(LAYER, q_BNR, selection, **more)


def loaded(instruction_set: str) -> Operators:
    require(instruction_set)
    return native.operators(instruction_set)


def kept(k_SGR: Tensor, num_beyond: int = 40) -> PartialKeys:
    """Partial keys of a row; behind them, and in the layers beside, lies what is no number."""
    length, num_kv_heads, num_columns = k_SGR.shape
    keys = PartialKeys(range(LAYER - 1, LAYER + 2), num_kv_heads, num_columns, length + num_beyond)
    for layer in keys.layers:
        keys.write(layer, 0, torch.full((length + num_beyond, num_kv_heads, num_columns), math.nan))
    keys.write(LAYER, 0, k_SGR)
    return keys


def rows_of(keys: list[Tensor], num_tokens: list[int] | None = None) -> PartialRows:
    return PartialRows([kept(k_SGR) for k_SGR in keys], [len(k_SGR) for k_SGR in keys], num_tokens)


def whole_numbers(*shape: int, seed: int) -> Tensor:
    """Whole numbers so small that every sum is exact in fp32, and many are equal."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def lists(picks: Picks) -> list[list[list[int]]]:
    """Picks by row and kv head."""
    assert picks.keys_BGK.dtype == picks.num_BG.dtype == torch.int32
    assert picks.keys_BGK.is_contiguous()
    assert picks.num_BG.is_contiguous()
    return [
        [keys_K[:num].tolist() for keys_K, num in zip(keys_GK, num_G.tolist(), strict=True)]
        for keys_GK, num_G in zip(picks.keys_BGK, picks.num_BG, strict=True)
    ]


def naive_closeness(q_NR: Tensor, k_SGR: Tensor, num_scored: int) -> list[list[float]]:
    """Closeness of each kv head's keys, one key and one head at a time."""
    num_kv_heads = k_SGR.shape[1]
    group = len(q_NR) // num_kv_heads
    closeness: list[list[float]] = []
    for g in range(num_kv_heads):
        keys = k_SGR[:num_scored, g].tolist()
        scores = [
            [sum(a * b for a, b in zip(q, key, strict=True)) for key in keys]
            for q in q_NR[g * group : (g + 1) * group].tolist()
        ]
        closeness.append([max(of_head[j] - max(of_head) for of_head in scores) for j in range(num_scored)])
    return closeness


def naive(
    q_NR: Tensor, k_SGR: Tensor, selection: Selection, has_new: bool = True, num_tokens: int | None = None
) -> list[list[int]]:
    """The definition."""
    length, num_kv_heads, _ = k_SGR.shape
    num_scored = length - (not has_new)
    closeness = naive_closeness(q_NR, k_SGR, num_scored)
    most = max(math.floor(selection.most_share * (num_tokens or length)), selection.free_keys)
    num_close = [sum(each > -selection.alpha for each in of_head) for of_head in closeness]
    num = min(max(math.ceil(sum(num_close) / num_kv_heads), 1), most)
    always = {*range(min(selection.num_first, length)), *range(max(length - selection.num_last, 0), length)}
    best = [sorted(range(num_scored), key=lambda j: (-of_head[j], j))[:num] for of_head in closeness]
    return [sorted({*keys, *always}) for keys in best]


@pytest.mark.parametrize("has_new", [True, False])
@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("num_columns", [1, 20])
def test_picks_are_those_of_the_definition(
    select: Select, num_columns: int, heads: tuple[int, int], selection: Selection, has_new: bool
) -> None:
    """Exactly, many scores being equal."""
    num_heads, num_kv_heads = heads
    keys = [whole_numbers(length, num_kv_heads, num_columns, seed=length) for length in LENGTHS]
    q_BNR = whole_numbers(len(keys), num_heads, num_columns, seed=1) / 4
    found = lists(select(q_BNR, rows_of(keys), selection, has_new=has_new))
    assert found == [naive(q_NR, k_SGR, selection, has_new) for q_NR, k_SGR in zip(q_BNR, keys, strict=True)]


@pytest.mark.parametrize("selection", SELECTIONS)
def test_rows_of_more_tokens_than_keys_may_pick_more_of_them(select: Select, selection: Selection) -> None:
    keys = [whole_numbers(length, 3, 20, seed=length) for length in LENGTHS]
    num_tokens = [3 * length + 1 for length in LENGTHS]
    q_BNR = whole_numbers(len(keys), 9, 20, seed=1) / 4
    found = lists(select(q_BNR, rows_of(keys, num_tokens), selection))
    each = zip(q_BNR, keys, num_tokens, strict=True)
    assert found == [naive(q_NR, k_SGR, selection, num_tokens=num) for q_NR, k_SGR, num in each]


@pytest.mark.parametrize("has_new", [True, False])
def test_closeness_is_told_of_every_key_that_has_a_partial_one(select: Select, has_new: bool) -> None:
    """Exactly, and nothing is written behind."""
    keys = [whole_numbers(length, 3, 20, seed=length) for length in LENGTHS]
    q_BNR = whole_numbers(len(keys), 9, 20, seed=1) / 4
    told_BGS = torch.full((len(keys), 3, max(LENGTHS) + 1), math.inf)
    selection = Selection(4.0, 0.2, 4, 16)
    picks = select(q_BNR, rows_of(keys), selection, has_new=has_new, closeness_BGS=told_BGS)
    assert lists(picks) == lists(select(q_BNR, rows_of(keys), selection, has_new=has_new))
    for told_GS, q_NR, k_SGR in zip(told_BGS, q_BNR, keys, strict=True):
        num_scored = len(k_SGR) - (not has_new)
        assert told_GS[:, :num_scored].tolist() == naive_closeness(q_NR, k_SGR, num_scored)
        assert torch.isposinf(told_GS[:, num_scored:]).all()


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_with_whole_keys_for_partial_ones_the_best_by_true_scores_are_picked(
    select: Select, share: float, scale: float
) -> None:
    """However close together, or far apart, scores are."""
    head_dim, length = 64, 700
    k_SGH = random(length, 2, head_dim, seed=1).bfloat16().float()
    q_BNH = scale * head_dim**-0.5 * random(1, 6, head_dim, seed=2)
    found = lists(select(q_BNH, rows_of([k_SGH]), Selection(math.inf, share, 0, 1)))
    num = math.floor(share * length)
    for g in range(2):
        scores_JS = q_BNH[0, 3 * g : 3 * g + 3].double() @ k_SGH[:, g].double().T
        closeness_S = (scores_JS - scores_JS.amax(1, keepdim=True)).amax(0)
        assert found[0][g] == sorted({*closeness_S.topk(num).indices.tolist(), length - 1})


def test_a_kv_head_with_few_close_keys_takes_as_many_as_are_close_to_others_in_the_mean(select: Select) -> None:
    """The first has 1 close key of 100, the second 50: 26 for each."""
    k_SGR = torch.zeros(100, 2, 1)
    k_SGR[:, 0, 0] = -10.0 * torch.arange(100)
    k_SGR[:50, 1, 0] = 10.0
    (found,) = lists(select(torch.ones(1, 2, 1), rows_of([k_SGR]), Selection(4.0, 1.0, 0, 1)))
    assert found == [[*range(26), 99]] * 2


def test_of_equal_keys_the_first_are_picked(select: Select) -> None:
    (found,) = lists(select(torch.ones(1, 2, 3), rows_of([torch.ones(500, 1, 3)]), Selection(1.0, 0.5, 0, 1)))
    assert found == [[*range(250), 499]]


@pytest.mark.parametrize("has_new", [True, False])
def test_without_threshold_and_bound_all_keys_are_picked(select: Select, has_new: bool) -> None:
    keys = [random(length, 3, 20, seed=length) for length in LENGTHS]
    found = lists(select(random(len(keys), 9, 20, seed=1), rows_of(keys), EVERYTHING, has_new=has_new))
    assert found == [[list(range(length))] * 3 for length in LENGTHS]


@pytest.mark.parametrize("selection", SELECTIONS)
def test_what_a_row_attends_to_depends_on_no_other_row(select: Select, selection: Selection) -> None:
    keys = [random(length, 3, 20, seed=length) for length in LENGTHS]
    q_BNR = random(len(keys), 9, 20, seed=1)
    together = lists(select(q_BNR, rows_of(keys), selection))
    spoilt = [torch.full_like(k_SGR, math.nan) if row % 2 else k_SGR for row, k_SGR in enumerate(keys)]
    q_BNR[1::2] = math.nan
    beside_spoilt = lists(select(q_BNR, rows_of(spoilt), selection))
    for row in range(0, len(keys), 2):
        assert lists(select(q_BNR[row : row + 1], rows_of([keys[row]]), selection)) == together[row : row + 1]
        assert beside_spoilt[row] == together[row]


@pytest.mark.parametrize("selection", SELECTIONS)
def test_what_is_no_number_is_never_better_than_a_number(select: Select, selection: Selection) -> None:
    keys = [random(length, 3, 20, seed=length) for length in LENGTHS]
    for k_SGR in keys:
        k_SGR[len(k_SGR) // 2, 1, 7] = math.nan
    q_BNR = random(len(keys), 9, 20, seed=1)
    q_BNR[:, 8] = math.inf
    found = select(q_BNR, rows_of(keys), selection)
    assert lists(found) == lists(by_torch(q_BNR, rows_of(keys), selection))
    for (_, of_spoilt, _), length in zip(lists(found), LENGTHS, strict=True):
        is_always = length // 2 < selection.num_first or length // 2 >= length - selection.num_last
        assert is_always or len(of_spoilt) == length or length // 2 not in of_spoilt


def test_threads_share_rows_and_long_ones_among_them(select: Select) -> None:
    keys = [random(length, 3, 20, seed=length) for length in (5000, *LENGTHS)]
    q_BNR, rows, selection = random(len(keys), 9, 20, seed=1), rows_of(keys), Selection(2.0, 0.2, 4, 16)
    before = torch.get_num_threads()
    found = []
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        found.append(lists(select(q_BNR, rows, selection)))
    torch.set_num_threads(before)
    assert found[0] == found[1]


SETS = sets()


@pytest.mark.parametrize("instruction_set", SETS)
def test_bad_arguments_are_refused(instruction_set: str) -> None:
    operators = loaded(instruction_set)
    q_BNR, one_B = torch.zeros(1, 4, 5), torch.ones(1, dtype=torch.int64)
    how_many = (4.0, 0.2, 1, 4, 16)
    with pytest.raises(RuntimeError, match="do not share"):
        operators.select_keys(q_BNR, (one_B, one_B, one_B, 0), 3, how_many)
    with pytest.raises(RuntimeError, match="float32"):
        operators.select_keys(q_BNR.bfloat16(), (one_B, one_B, one_B, 0), 2, how_many)
    with pytest.raises(RuntimeError, match="contiguous"):
        operators.select_keys(q_BNR[..., ::2], (one_B, one_B, one_B, 0), 2, how_many)
    with pytest.raises(RuntimeError, match="for each row"):
        operators.select_keys(q_BNR, (one_B, torch.ones(2, dtype=torch.int64), one_B, 0), 2, how_many)
    with pytest.raises(RuntimeError, match="every row has a key"):
        operators.select_keys(q_BNR, (one_B, 0 * one_B, one_B, 0), 2, how_many)
    with pytest.raises(RuntimeError, match="may pick no key"):
        operators.select_keys(q_BNR, (one_B, one_B, one_B, 0), 2, (4.0, 0.2, 0, 4, 16))
    with pytest.raises(RuntimeError, match="no room for every key"):
        operators.select_keys(q_BNR, (one_B, one_B, one_B, 0), 2, how_many, closeness_BGS=torch.empty(1, 2, 0))
