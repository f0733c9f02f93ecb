"""Unpacking what is picked, in C++ for every processor, beside plain torch: each K and V at its place, nothing else.

B rows, G kv heads, T tokens, H head dim, W bytes of a packed head, M groups of C channels, K picks at most.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from baton.modeling.forward.selection import Picks
from baton.modeling.kernels import native
from baton.modeling.kv.buffers import TORCH_DTYPES
from generate_workers.residency.int4.format import Int4Format, has_int4_kernel
from tests.support.kernels.int4 import HEAD_DIMS, form_of, packed, random_kv
from tests.support.kernels.paths import require, sets

pytestmark = pytest.mark.skipif(not has_int4_kernel(), reason="needs a C++ compiler")

NUM_TOKENS = (700, 5, 40)
NUM_PICKS = ((600, 1), (5, 0), (17, 40))
"""Picks by row and kv head: more than a thread's run, one, all, none, and some that are not packed."""
UNTOUCHED = 7.0


def plain_unpacked(form: Int4Format, packed_T2GW: Tensor) -> Tensor:
    """`least + code * step` of each channel, in fp32, rounded to the plain dtype."""
    num_bytes = form.plain.head_dim // 2
    codes_T2GB, of_groups_T2GB = packed_T2GW[..., :num_bytes], packed_T2GW[..., num_bytes:].contiguous()
    shape_T2GM = (*packed_T2GW.shape[:3], form.plain.head_dim // form.group)
    codes_T2GMC = torch.stack((codes_T2GB >> 4, codes_T2GB & 15), -1).view(*shape_T2GM, form.group).float()
    step_T2GM1, least_T2GM1 = of_groups_T2GB.view(torch.float16).float().view(*shape_T2GM, 2).chunk(2, -1)
    values_T2GMC = codes_T2GMC * step_T2GM1 + least_T2GM1
    return values_T2GMC.flatten(-2).to(TORCH_DTYPES[form.plain.dtype])


def some_picks(num_tokens: Sequence[int] = NUM_TOKENS, num_picks: Sequence[Sequence[int]] = NUM_PICKS) -> Picks:
    """Ascending, with three tokens behind those that are packed; what lies behind a list is no key."""
    generator = torch.Generator().manual_seed(5)
    most = max(max(each) for each in num_picks)
    keys_BGK = torch.full((len(num_tokens), len(num_picks[0]), most), -(2**31), dtype=torch.int32)
    for row, (length, nums) in enumerate(zip(num_tokens, num_picks, strict=True)):
        for head, num in enumerate(nums):
            keys_K = torch.randperm(length + 3, generator=generator)[:num].sort().values
            keys_BGK[row, head, :num] = keys_K.int()
    return Picks(keys_BGK, torch.tensor(num_picks, dtype=torch.int32))


def addresses(tensors: Sequence[Tensor]) -> Tensor:
    return torch.tensor([each.data_ptr() for each in tensors])


@pytest.mark.parametrize("instruction_set", sets())
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_picked_comes_to_its_place_and_nothing_else(instruction_set: str, head_dim: int, dtype: str) -> None:
    require(instruction_set)
    operator = native.operators(instruction_set).unpack_picked_kv
    form, picks = form_of(head_dim, dtype, num_kv_heads=2), some_picks()
    rows = [packed(form, random_kv(form, num, seed=num)) for num in NUM_TOKENS]
    areas = [torch.full((num + 3, 2, 2, head_dim), UNTOUCHED, dtype=TORCH_DTYPES[dtype]) for num in NUM_TOKENS]
    expected, num_expected = [area.clone() for area in areas], 0
    for row, packed_T2GW in enumerate(rows):
        plain_T2GH = plain_unpacked(form, packed_T2GW)
        for head, num in enumerate(NUM_PICKS[row]):
            keys_K = [key for key in picks.keys_BGK[row, head, :num].tolist() if key < len(plain_T2GH)]
            expected[row][keys_K, :, head] = plain_T2GH[keys_K, :, head]
            num_expected += len(keys_K)
    lists = picks.keys_BGK, picks.num_BG
    sizes = head_dim, form.group, dtype == "bfloat16"
    num_unpacked = operator(addresses(rows), addresses(areas), torch.tensor(NUM_TOKENS), lists, sizes)
    assert num_unpacked == num_expected < sum(map(sum, NUM_PICKS))
    assert all(torch.equal(area, other) for area, other in zip(areas, expected, strict=True))


def test_all_picks_are_what_unpacking_everything_makes() -> None:
    form = form_of(64, "bfloat16", num_kv_heads=2)
    packed_T2GW = packed(form, random_kv(form, 300))
    whole_T2GH, area_T2GH = (torch.zeros(300, 2, 2, 64, dtype=torch.bfloat16) for _ in range(2))
    form.unpack(packed_T2GW, whole_T2GH)
    keys_BGK = torch.arange(300, dtype=torch.int32).repeat(1, 2, 1)
    picks = Picks(keys_BGK, torch.full((1, 2), 300, dtype=torch.int32))
    num = form.unpack_picked(addresses([packed_T2GW]), addresses([area_T2GH]), torch.tensor([300]), picks)
    assert num == 600
    assert torch.equal(area_T2GH, whole_T2GH)
    assert torch.equal(whole_T2GH, plain_unpacked(form, packed_T2GW))


@pytest.mark.parametrize(
    ("picks", "message"),
    [
        (Picks(torch.tensor([[[3, -1]]]).int(), torch.tensor([[2]]).int()), "picks are counted from 0"),
        (Picks(torch.tensor([[[3, 4]]]).int(), torch.tensor([[3]]).int()), "a list has at most 2 picks"),
        (Picks(torch.tensor([[[3, 4]]] * 2).int(), torch.tensor([[2]] * 2).int()), r"picks must be \[B, G, K\]"),
        (Picks(torch.tensor([[[3, 4]]]).int(), torch.tensor([[2, 2]]).int()), r"numbers of picks must be \[B, G\]"),
        (Picks(torch.tensor([[[3], [4]]]).int(), torch.tensor([[1, 1]]).int()), "picks are of 2 kv heads, rows of 1"),
        (Picks(torch.tensor([[[3, 4]]]), torch.tensor([[2]]).int()), "picks must be .* int32"),
    ],
)
def test_picks_that_cannot_be_are_refused(picks: Picks, message: str) -> None:
    form = form_of(16)
    packed_T2GW, area_T2GH = packed(form, random_kv(form, 9)), torch.zeros(9, 2, 1, 16)
    with pytest.raises(RuntimeError, match=message):
        form.unpack_picked(addresses([packed_T2GW]), addresses([area_T2GH]), torch.tensor([9]), picks)
    assert not area_T2GH.any()
