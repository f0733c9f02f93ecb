"""Notes of picks in pools, and the victims, by the kernel on every path, against plain Python."""

import pytest
import torch
from torch import Tensor

from baton.modeling.kernels import native
from baton.modeling.kernels.calls.operators import Operators
from tests.support.kernels.paths import require, sets

NUM_HEADS = 3
BITS = 23
SETS = sets()


def loaded(instruction_set: str) -> Operators:
    require(instruction_set)
    return native.operators(instruction_set)


def random_orders(num_lists: int, num_places: int, most_mark: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Marks, of which many are equal, and positions, of which none are; one place more than there are."""
    generator = torch.Generator().manual_seed(seed)
    marks_XP = torch.randint(0, most_mark, (num_lists, num_places + 1), generator=generator)
    positions_XP = torch.stack([torch.randperm(num_places + 1, generator=generator) for _ in range(num_lists)])
    bits = BITS if dtype == torch.int32 else 32
    positions_XP[:, 0] = (1 << BITS) - 1  # as large as they come
    return (marks_XP << bits | positions_XP).to(dtype)


def noted(orders: list[int], picks: list[int], position: int, bits: int, most_count: int) -> list[int]:
    """The definition: of LRU for most_count 0, else of counters."""
    marks = [order >> bits for order in orders]
    for place in picks:
        marks[place] = marks[place] + 1 if most_count else position
    is_full = most_count and any(marks[place] >= most_count for place in picks)
    halved = [mark // 2 if is_full else mark for mark in marks[:-1]] + marks[-1:]
    return [mark << bits | order & ((1 << bits) - 1) for mark, order in zip(halved, orders, strict=True)]


def victim(orders: list[int], closeness: list[float], first: int, end: int, bits: int) -> int:
    return min(range(first, end), key=lambda place: (orders[place] >> bits, closeness[place], orders[place]))


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("most_count", [0, 4, 255])
@pytest.mark.parametrize(("num_places", "first", "end"), [(1, 0, 1), (20, 4, 5), (64, 4, 49), (333, 0, 333)])
def test_notes_and_victims_are_those_of_the_definition(
    instruction_set: str, most_count: int, num_places: int, first: int, end: int
) -> None:
    """Some rows are full, one is not, and one has a pool that hears nothing."""
    operators, generator = loaded(instruction_set), torch.Generator().manual_seed(num_places)
    dtype, bits = (torch.int32, BITS) if most_count else (torch.int64, 32)
    positions = [num_places, num_places - 1, 1000, num_places + 7, 2000, 3000]
    most_mark = most_count or 50
    rows = [random_orders(NUM_HEADS, num_places, most_mark, dtype, seed) for seed in range(len(positions))]
    before = [orders_GP.tolist() for orders_GP in rows]
    shape = (len(positions), NUM_HEADS)
    is_picked_BGP = torch.rand(*shape, num_places + 1, generator=generator) < 0.3
    is_picked_BGP[..., -1] = True
    lists = [[is_picked_P.nonzero().flatten().tolist() for is_picked_P in row] for row in is_picked_BGP]
    keys_BGK = torch.full((*shape, num_places + 5), 10**6, dtype=torch.int32)
    for row, picks_G in enumerate(lists):
        for head, picks in enumerate(picks_G):
            keys_BGK[row, head, : len(picks)] = torch.tensor(picks)
    closeness_BGS = -torch.randint(0, 3, (*shape, num_places + 2), generator=generator).float()
    closeness_BGS[0, :, ::2] = torch.finfo(torch.float32).min
    closeness_BGS[1:, :, 1::2] += 0.0  # zeros are 0.0 here, -0.0 there
    deaf = 4
    addresses_B = torch.tensor([0 if row == deaf else orders_GP.data_ptr() for row, orders_GP in enumerate(rows)])
    found_BG = operators.note_picks(
        keys_BGK,
        is_picked_BGP.sum(2, dtype=torch.int32),
        closeness_BGS,
        (addresses_B, torch.tensor(positions)),
        (num_places, first, end, bits, most_count),
    )
    for row, position in enumerate(positions):
        for head in range(NUM_HEADS):
            orders, picks = before[row][head], lists[row][head]
            expected = orders if row == deaf else noted(orders, picks, position, bits, most_count)
            assert rows[row][head].tolist() == expected
            if row != deaf and position >= num_places:
                closeness = closeness_BGS[row, head].tolist()
                assert int(found_BG[row, head]) == victim(expected, closeness, first, end, bits)


@pytest.mark.parametrize("instruction_set", SETS)
def test_bad_arguments_are_refused(instruction_set: str) -> None:
    operators, one_B = loaded(instruction_set), torch.zeros(1, dtype=torch.int64)
    keys_BGK, num_BG = torch.zeros(1, 2, 4, dtype=torch.int32), torch.ones(1, 2, dtype=torch.int32)
    closeness_BGS, limit = torch.zeros(1, 2, 8), (8, 0, 8, 23, 255)
    with pytest.raises(RuntimeError, match="picks must be int32"):
        operators.note_picks(keys_BGK.long(), num_BG, closeness_BGS, (one_B, one_B), limit)
    with pytest.raises(RuntimeError, match="of every place"):
        operators.note_picks(keys_BGK, num_BG, closeness_BGS[..., :7].contiguous(), (one_B, one_B), limit)
    with pytest.raises(RuntimeError, match="for each row"):
        operators.note_picks(keys_BGK, num_BG, closeness_BGS, (one_B, one_B.int()), limit)
    with pytest.raises(RuntimeError, match="nobody may go"):
        operators.note_picks(keys_BGK, num_BG, closeness_BGS, (one_B, one_B), (8, 8, 8, 23, 255))
    orders = torch.zeros(2, 9, dtype=torch.int32)
    orders_B = torch.tensor([orders.data_ptr()])
    for wrong in (-1, 9):
        with pytest.raises(RuntimeError, match="picks are places, from 0 to 8"):
            operators.note_picks(torch.full_like(keys_BGK, wrong), num_BG, closeness_BGS, (orders_B, one_B), limit)
    with pytest.raises(RuntimeError, match="at most 4 picks"):
        operators.note_picks(keys_BGK, 5 * num_BG, closeness_BGS, (orders_B, one_B), limit)
    assert not orders.any()
