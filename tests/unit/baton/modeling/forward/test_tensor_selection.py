"""Keys chosen by operations on tensors: the picks of the kernel for CPUs, key by key, with ties and what is no number.

Partial keys and queries are small whole numbers, so that every sum is exact and ties are many.
"""

import math

import pytest
import torch
from torch import Tensor

from baton.modeling.device.cpu import CpuDevice
from baton.modeling.forward.selection import KeyProjection, PartialKeys, PartialRows, Picks, Selection
from baton.modeling.forward.tensor_selection import (
    TensorPartialKeys,
    TensorPartialRows,
    packed,
    partial_blocks,
    partial_layout,
)
from baton.modeling.kv.pages import PagePool

LAYERS = range(2, 4)
G, J, R, H = 3, 2, 5, 12
LENGTHS = (1, 2, 40, 17, 90)
SELECTIONS = [
    Selection(4.0, 0.2, 2, 3),
    Selection(math.inf, 0.3, 0, 1),
    Selection(6.0, 1.0, 1, 8, free_keys=4),
    Selection(0.5, 0.1, 100, 1),
    Selection(9.0, 0.05, 2, 200, free_keys=6),
]


def pool(num_rows: int = 8) -> PagePool:
    """Rows for the longest of LENGTHS; nothing is zero before it is written."""
    made = PagePool(CpuDevice().pool_memory(partial_layout(LAYERS, G, R), num_rows, partial_blocks(max(LENGTHS))))
    made.memory.data_LPS2GH.fill_(torch.nan)
    return made


def whole_numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed + len(shape))).float()


def filled(seed: int) -> tuple[PartialRows, TensorPartialRows]:
    """The same rows for both, which the pool has in no order, without the new tokens' partial keys."""
    rows_pool = pool()
    theirs = [PartialKeys(LAYERS, G, R, max(LENGTHS)) for _ in LENGTHS]
    ours = [TensorPartialKeys(LAYERS, G, R, rows_pool) for _ in LENGTHS]
    for each in (*reversed(ours[:3]), *ours[3:]):
        each.expect(1)
    projection = KeyProjection.of(whole_numbers(G, H, R, seed=seed))
    for at, length in enumerate(LENGTHS):
        for layer in LAYERS:
            k_TGH = whole_numbers(length - 1, G, H, seed=seed + 10 * at + layer)
            theirs[at].write(layer, 0, k_TGH, projection)
            ours[at].write(layer, 0, k_TGH, projection)
    tokens = [length + 5 for length in LENGTHS]
    return PartialRows(theirs, LENGTHS, tokens), TensorPartialRows(ours, LENGTHS, tokens)


def listed(picks: Picks) -> list[list[int]]:
    """The keys of each row and kv head."""
    lists = zip(picks.keys_BGK.flatten(0, 1).tolist(), picks.num_BG.flatten().tolist(), strict=True)
    return [keys[:num] for keys, num in lists]


@pytest.mark.parametrize("has_new", [False, True])
@pytest.mark.parametrize("selection", SELECTIONS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_picks_are_those_of_the_kernel(seed: int, selection: Selection, has_new: bool) -> None:
    theirs, ours = filled(seed)
    if has_new:
        k_BGH, projection = whole_numbers(len(LENGTHS), G, H), KeyProjection.of(whole_numbers(G, H, R, seed=seed))
        for each in (theirs, ours):
            each.append(3, k_BGH, projection)
    q_BNR = whole_numbers(len(LENGTHS), G * J, R, seed=seed)
    expected = theirs.select(3, q_BNR, selection, has_new=has_new)
    found = ours.select(3, q_BNR, selection, has_new=has_new)
    assert listed(found) == listed(expected)
    assert found.keys_BGK.dtype == found.num_BG.dtype == torch.int32


def test_a_row_does_not_depend_on_the_others() -> None:
    _, ours = filled(0)
    q_BNR = whole_numbers(len(LENGTHS), G * J, R)
    together = listed(ours.select(2, q_BNR, SELECTIONS[0], has_new=False))
    for at, keys in enumerate(rows_of(ours)):
        alone = TensorPartialRows([keys], [LENGTHS[at]], [LENGTHS[at] + 5])
        assert listed(alone.select(2, q_BNR[at : at + 1], SELECTIONS[0], has_new=False)) == together[G * at :][:G]


def rows_of(rows: TensorPartialRows) -> list[TensorPartialKeys]:
    """PartialKeys that stand for each of the rows."""
    made = []
    for number in rows._rows_B.tolist():
        each = TensorPartialKeys(LAYERS, G, R, rows._keys.memory.pool)
        each.memory._pages = [number]
        made.append(each)
    return made


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_scores_that_are_no_numbers_count_as_the_kernels_do(wrong: float) -> None:
    theirs, ours = filled(1)
    k_1GH = torch.full((1, G, H), wrong)
    projection = KeyProjection.of(torch.eye(H)[:, :R].repeat(G, 1, 1))
    for each in (theirs.keys[2], rows_of(ours)[2]):
        each.write(3, 4, k_1GH, projection)
    q_BNR = whole_numbers(len(LENGTHS), G * J, R).abs() + 1
    expected = theirs.select(3, q_BNR, SELECTIONS[0], has_new=False)
    assert listed(ours.select(3, q_BNR, SELECTIONS[0], has_new=False)) == listed(expected)


def test_a_copy_has_the_keys_of_the_other_row_and_memory_comes_back() -> None:
    rows_pool = pool(2)
    one, other = (TensorPartialKeys(LAYERS, G, R, rows_pool) for _ in range(2))
    one.expect(1)
    other.expect(1)
    assert one.num_bytes == one.bytes_for(5) == rows_pool.page_bytes
    with pytest.raises(MemoryError):
        TensorPartialKeys(LAYERS, G, R, rows_pool).expect(1)
    k_TGH = whole_numbers(20, G, H)
    projection = KeyProjection.of(whole_numbers(G, H, R))
    one.write(2, 0, k_TGH, projection)
    other.copy_from(one, 20)
    kept_GSR = other.pool_LPGSR[0, other.memory.number, :, :21]
    assert torch.equal(kept_GSR[:, :20].transpose(0, 1), projection.apply(k_TGH).bfloat16())
    assert bool(kept_GSR[:, 20].isnan().all())
    for each in (one, other):
        each.release()
        each.release()
        assert each.num_bytes == 0
    assert rows_pool.num_taken == 0


def test_entries_move_to_the_front_in_order() -> None:
    is_entry_BGX = torch.tensor([[[False, True, False, True], [False] * 4]])
    values = torch.tensor([5, 6, 7, 8], dtype=torch.int32)
    first, second, num_BG = packed(is_entry_BGX, 3, values, -values)
    assert first.tolist() == [[[6, 8, 0], [0, 0, 0]]]
    assert second.tolist() == [[[-6, -8, 0], [0, 0, 0]]]
    assert num_BG.tolist() == [[2, 0]]
