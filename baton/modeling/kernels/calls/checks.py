"""Checks of tensors before their addresses are passed to the C++ kernels. Each raises RuntimeError, in one line."""

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float32)
Pair = tuple[Tensor | None, Tensor | None]
Table = tuple[Tensor | None, int]
"""Pages of rows, and the number of tokens of a page."""


def require(holds: bool, text: str) -> None:
    """Raise RuntimeError with `text` unless the condition holds."""
    if not holds:
        raise RuntimeError(text)


def numbers(tensor: Tensor, dtype: torch.dtype, count: int, text: str) -> int:
    """Return the address of a tensor of `count` contiguous numbers of a dtype, on the CPU. Raises RuntimeError with
    `text` for any other tensor."""
    if tensor.dtype is not dtype or tensor.numel() != count or not tensor.is_contiguous() or not tensor.is_cpu:
        raise RuntimeError(text)
    return tensor.data_ptr()


def optional(tensor: Tensor | None, dtype: torch.dtype, count: int, text: str) -> int | None:
    """Return the address as `numbers` does, or None for None."""
    return None if tensor is None else numbers(tensor, dtype, count, text)


def row_keys(
    lengths_B: Tensor,
    num_kv_heads: int,
    picks: Pair,
    others: Pair,
    table: Table,
    *,
    num_layers: int = 1,
) -> tuple[int | None, ...]:
    """Return the arguments that describe the keys that rows attend to, in the order of RowKeys in
    attention/decode_checks.h.

    `picks`: lists of selected keys, and the length of each list. `others`: the numbers of queries, and the keys that
    are left out. `table`: the rows' pages, and the number of tokens of a page."""
    B = lengths_B.numel()
    (picks_BGK, num_BG), (queries_B, unseen_B2), (pages_BC, page_tokens) = picks, others, table
    lengths = numbers(lengths_B, torch.int64, B, "lengths must be [B] int64, contiguous")
    listed = num = queries = unseen = pages = None
    num_picks = num_pages = 0
    if picks_BGK is not None or num_BG is not None:
        if picks_BGK is None or num_BG is None:
            raise RuntimeError("picks come with their numbers")
        num_picks, num_lists = picks_BGK.shape[-1], B * num_kv_heads
        require(num_picks > 0, "every list picks a key")
        lists = "picks must be [B, G, K] int32 in each layer, contiguous"
        listed = numbers(picks_BGK, torch.int32, num_layers * num_lists * num_picks, lists)
        num = numbers(num_BG, torch.int32, num_lists, "numbers of picks must be [B, G] int32, contiguous")
    if queries_B is not None:
        queries = numbers(queries_B, torch.int64, B, "numbers of queries must be [B] int64, contiguous")
    if unseen_B2 is not None:
        unseen = numbers(unseen_B2, torch.int64, 2 * B, "keys that are left out must be [B, 2] int64, contiguous")
    if pages_BC is not None:
        num_pages = pages_BC.shape[-1]
        require(num_pages > 0, "a row has more keys than its block table names: 0")
        pages = numbers(pages_BC, torch.int64, B * num_pages, "block tables must be [B, pages] int64, contiguous")
    return lengths, listed, num, num_picks, queries, unseen, pages, num_pages, page_tokens
