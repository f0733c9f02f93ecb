"""Checks of tensors before their addresses are passed to the C++ kernels. Each raises RuntimeError, in one line."""

from typing import NamedTuple

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float32)
KeyLists = tuple[Tensor, Tensor]
"""Selected keys of each row and kv head, `[B, G, K]` in each layer, and the length of each list, `[B, G]`, int32."""
Table = tuple[Tensor | None, int]
"""Pages of rows, and the number of tokens of a page."""
NO_TABLE: Table = (None, 0)


class RowKeys(NamedTuple):
    """Keys of B rows: their memory, and which of them the rows attend to. Tensors are int64, on the CPU."""

    addresses_B: Tensor
    """Address of each row's first key, in each layer. For keys in pages: the offset in bytes of the layer from the
    first layer."""
    lengths_B: Tensor
    """Number of keys of each row, up to and including its own key."""
    table: Table = NO_TABLE
    queries_B: Tensor | None = None
    """Number of rows of the sequence to which each row belongs. None: one."""
    unseen_B2: Tensor | None = None
    """Range of keys that each row does not attend to: first number, and end (exclusive). None: rows
    attend to all keys."""


def require(holds: bool, text: str) -> None:
    """Raise RuntimeError with `text` unless the condition holds."""
    if not holds:
        raise RuntimeError(text)


def numbers(tensor: Tensor, dtype: torch.dtype, count: int, text: str) -> int:
    """Return the address of a tensor of `count` contiguous numbers of a dtype, on the CPU. Raises RuntimeError with
    `text` if the tensor does not fit."""
    if tensor.dtype is not dtype or tensor.numel() != count or not tensor.is_contiguous() or not tensor.is_cpu:
        raise RuntimeError(text)
    return tensor.data_ptr()


def optional(tensor: Tensor | None, dtype: torch.dtype, count: int, text: str) -> int | None:
    """Return the address of a tensor as `numbers` does, or None if the tensor is None."""
    return None if tensor is None else numbers(tensor, dtype, count, text)


def row_keys(
    keys: RowKeys, num_kv_heads: int, picks: KeyLists | None, *, num_layers: int = 1
) -> tuple[int | None, ...]:
    """Return the arguments that describe the keys that rows attend to, in the order of RowKeys in
    attention/decode_checks.h. With `picks`, rows attend to these keys only."""
    B = keys.lengths_B.numel()
    lengths = numbers(keys.lengths_B, torch.int64, B, "lengths must be [B] int64, contiguous")
    listed = num = queries = unseen = None
    num_picks = 0
    if picks is not None:
        (picks_BGK, num_BG), num_lists = picks, B * num_kv_heads
        num_picks = picks_BGK.shape[-1]
        require(num_picks > 0, "every list picks a key")
        lists = "picks must be [B, G, K] int32 in each layer, contiguous"
        listed = numbers(picks_BGK, torch.int32, num_layers * num_lists * num_picks, lists)
        num = numbers(num_BG, torch.int32, num_lists, "numbers of picks must be [B, G] int32, contiguous")
    if keys.queries_B is not None:
        queries = numbers(keys.queries_B, torch.int64, B, "numbers of queries must be [B] int64, contiguous")
    if keys.unseen_B2 is not None:
        unseen = numbers(keys.unseen_B2, torch.int64, 2 * B, "keys left out must be [B, 2] int64, contiguous")
    return lengths, listed, num, num_picks, queries, unseen, *block_tables(keys.table, B)


def block_tables(table: Table, num_rows: int) -> tuple[int | None, int, int]:
    """Return the address of the rows' pages, the number of pages of a row, and the number of tokens of a page."""
    pages_BC, page_tokens = table
    if pages_BC is None:
        return None, 0, page_tokens
    num_pages = pages_BC.shape[-1]
    require(num_pages > 0, "a row has more keys than its block table names: 0")
    pages = numbers(pages_BC, torch.int64, num_rows * num_pages, "block tables must be [B, pages] int64, contiguous")
    return pages, num_pages, page_tokens
