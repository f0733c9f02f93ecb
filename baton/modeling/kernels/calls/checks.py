"""Checks of tensors before their addresses are passed to the C++ kernels. Each check raises RuntimeError with a
one-line message."""

from typing import NamedTuple

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float32)
KeyLists = tuple[Tensor, Tensor]
"""Selected keys of each new token and kv head, as a pair of int32 tensors. The first contains the lists of keys:
`[B, G, K]` for one layer, or `[L, B, G, K]` for all layers. The second contains the lengths of the lists, `[B, G]`,
which are the same in all layers."""
Table = tuple[Tensor | None, int]
"""Block tables, as a pair: the addresses (int64) of the pages that hold the keys of each new token, and the number of
tokens of a page. If KV is contiguous, the addresses are None."""
NO_TABLE: Table = (None, 0)


class RowKeys(NamedTuple):
    """Keys of B new tokens (rows): their memory addresses, and which of the keys each token attends to. All tensors are
    int64 on the CPU."""

    addresses_B: Tensor
    """Memory address, for each new token, of the first key that `lengths_B` counts: `[B]` for one layer, or `[L, B]`
    for all layers. If KV is in pages, an entry is instead an offset in bytes: the distance from a page's memory in the
    pool's first layer to the same page's memory in the layer of the entry."""
    lengths_B: Tensor
    """Number of keys of each new token, up to and including its own key."""
    table: Table = NO_TABLE
    queries_B: Tensor | None = None
    """For each new token, the number of new tokens of its sequence. None: each sequence has one new token."""
    unseen_B2: Tensor | None = None
    """Range of keys to which each new token does not attend: index of the first key, and end (exclusive). None: no keys
    are excluded."""


def require(holds: bool, text: str) -> None:
    """Raise RuntimeError with `text` unless `holds` is True."""
    if not holds:
        raise RuntimeError(text)


def numbers(tensor: Tensor, dtype: torch.dtype, count: int, text: str) -> int:
    """Return the address of a tensor. Raises RuntimeError with `text` unless the tensor has this dtype, has `count`
    elements, is contiguous and is on the CPU."""
    if tensor.dtype is not dtype or tensor.numel() != count or not tensor.is_contiguous() or not tensor.is_cpu:
        raise RuntimeError(text)
    return tensor.data_ptr()


def optional(tensor: Tensor | None, dtype: torch.dtype, count: int, text: str) -> int | None:
    """Return the address of a tensor after the checks of `numbers`. Return None if the tensor is None."""
    return None if tensor is None else numbers(tensor, dtype, count, text)


def row_keys(
    keys: RowKeys, num_kv_heads: int, picks: KeyLists | None, *, num_layers: int = 1
) -> tuple[int | None, ...]:
    """Check the keys to which new tokens attend. Return them as kernel arguments, in the order of the struct RowKeys in
    attention/decode_checks.h. If `picks` is given, the tokens attend only to the selected keys."""
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
    """Check block tables and return them as kernel arguments: the address of the tables, the number of pages that a
    table lists, and the number of tokens of a page. `num_rows`: number of new tokens, each of which has a table."""
    pages_BC, page_tokens = table
    if pages_BC is None:
        return None, 0, page_tokens
    num_pages = pages_BC.shape[-1]
    require(num_pages > 0, "a row has more keys than its block table names: 0")
    pages = numbers(pages_BC, torch.int64, num_rows * num_pages, "block tables must be [B, pages] int64, contiguous")
    return pages, num_pages, page_tokens
