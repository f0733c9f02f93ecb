"""Checks of Triton's copies by address against copies by torch, in memory that kernels can access on this machine."""

import torch
from torch import Tensor

from baton.modeling.kernels.triton.copies import copy_heads, copy_rows

NUM_ROWS, NUM_HEADS, NUM_TOKENS, MOST_PAIRS = 3, 2, 300, 150
HEADS = [(torch.float32, 16), (torch.bfloat16, 128), (torch.float16, 81)]
"""Dtypes and head dims. They cover copies in words of 4 and of 2 bytes, and lists of (source, target) pairs that fill
one tile or several."""
ROWS = [(5000, torch.float32), (33, torch.bfloat16)]
"""Number of elements of a row, and their dtype."""


def check_heads(dtype: torch.dtype, head_dim: int, device: str) -> None:
    """Assert that exactly the listed (key, place) pairs are copied, for lists that have no, one, many or the maximum
    number of pairs. Host memory is pinned on a GPU."""
    generator = torch.Generator().manual_seed(head_dim)
    shape = (NUM_ROWS, NUM_TOKENS, 2, NUM_HEADS, head_dim)
    home_BS2GH = torch.randn(shape, generator=generator).to(dtype)
    home_BS2GH = home_BS2GH.pin_memory() if device == "cuda" else home_BS2GH
    there_BS2GH = torch.full(shape, 7.0, dtype=dtype, device=device)
    pairs_BGK2 = torch.stack(
        [
            torch.stack([torch.randperm(NUM_TOKENS, generator=generator)[:MOST_PAIRS] for _ in range(2)], 1)
            for _ in range(NUM_ROWS * NUM_HEADS)
        ]
    ).view(NUM_ROWS, NUM_HEADS, MOST_PAIRS, 2)
    num_BG = torch.tensor([[0, 1], [MOST_PAIRS, 5], [129, 70]])
    expected = there_BS2GH.cpu().clone()
    for row in range(NUM_ROWS):
        for head in range(NUM_HEADS):
            keys, places = pairs_BGK2[row, head, : num_BG[row, head]].unbind(1)
            expected[row, places, :, head] = home_BS2GH[row, keys, :, head]
    lists = pairs_BGK2.int().to(device), num_BG.int().to(device)
    copy_heads(_addresses(home_BS2GH, device), _addresses(there_BS2GH, device), *lists, head_dim * dtype.itemsize)
    assert torch.equal(there_BS2GH.cpu(), expected)


def check_rows(num_numbers: int, dtype: torch.dtype, device: str) -> None:
    """Assert that the first bytes of each row are copied to host memory, and no other bytes."""
    there_BX = torch.randn(NUM_ROWS, num_numbers + 1).to(device, dtype)
    home_BX = torch.zeros(NUM_ROWS, num_numbers + 1, dtype=dtype, pin_memory=device == "cuda")
    expected = there_BX.cpu().clone()
    expected[:, -1] = 0
    copy_rows(_addresses(there_BX, device), _addresses(home_BX, device), num_numbers * dtype.itemsize)
    if device == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(home_BX, expected)


def _addresses(rows: Tensor, device: str) -> Tensor:
    return torch.tensor([each.data_ptr() for each in rows], device=device)
