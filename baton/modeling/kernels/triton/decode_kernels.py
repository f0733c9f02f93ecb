"""Triton kernels of decode attention: one computes the attention of a part of a sequence's keys, the other merges the
parts. Imports Triton.

A program serves one kv head of one sequence. It computes M pairs of a query and one of the R heads that share the kv
head, and reads the keys only once for all pairs.

A program attends to the keys in a *list*. If keys are selected, the list contains the keys that the kv head selects.
Otherwise the list begins with the first key to which some query attends. It contains this key and all later keys of the
sequence, except the keys that the sequence excludes. Each split takes `split_keys` entries of the list. Keys that are
not in the list are not read.

Shape letters: B sequences, T tokens, N heads, G kv heads, R = N / G, H head dim (padded), M pairs, S keys of a tile, X
splits, K selected keys.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from baton.modeling.kernels.triton.heads import Inputs, Pages
from baton.modeling.kernels.triton.softmax import begun, ended, product, weighed

MERGED = tl.constexpr(8)
"""Number of splits (parts of a sequence's list of keys) whose results are merged at a time."""


@dataclass(frozen=True)
class DecodeShape:
    """Compile-time parameters of the kernels. Each combination of values is compiled separately."""

    num_kv_heads: int
    group: int
    """Number of query heads that share a kv head."""
    head_dim: int
    head_pad: int
    page_tokens: int
    window: int
    """Sliding window: number of latest keys to which a query attends, including its own key. 0: all keys."""
    has_picks: bool
    has_unseen: bool
    tile_rows: int
    """Number of pairs of a query and a head that one program computes."""
    tile_keys: int
    split_keys: int
    is_split: bool
    """True if the keys of a sequence may be divided into several splits. A second launch then merges the results of the
    splits."""
    in_one_page: bool
    """True if the keys of each tile are adjacent within one page."""
    scale: float
    """Factor on the scores: log2(e) / sqrt(head dim). The softmax uses powers of two."""
    widen: bool
    """True if operands of matrix products are converted to fp32. Triton's interpreter needs this for bf16."""


class Rows(NamedTuple):
    """Kernel argument: addresses of the tensors of `StepRows`, of the lists of selected keys, and of the ranges of
    excluded keys."""

    table: Any
    table_stride: int
    lengths: Any
    starts: Any
    firsts: Any
    picks: Any
    num_picks: Any
    unseen: Any


class Results(NamedTuple):
    """Kernel argument: address of the final results `[T, N, H]`, and addresses of the results `[U, N, X, H]` and
    log-sum-exps `[U, N, X]` of the splits (parts of a list of keys). U is the number of new tokens of the sequences,
    and T the number of tokens of the step."""

    o: Any
    part_o: Any
    part_lse: Any


@triton.jit
def listed(rows: Rows, row: tl.tensor, kv_head: tl.tensor, most_picks: tl.tensor, shape: tl.constexpr) -> tl.tuple:
    """Describe the list of keys to which a sequence attends in one kv head. Return the length of the list, and a tuple
    of four numbers: the number of keys of the sequence, the index of the first key to which some query may attend, the
    index of the first excluded key, and the number of excluded keys. Keys are indexed within their sequence."""
    length = tl.load(rows.lengths + row)
    first = 0
    if shape.window > 0:
        num_queries = tl.load(rows.starts + row + 1) - tl.load(rows.starts + row)
        first = tl.maximum(length - num_queries - shape.window + 1, 0)
    gap = length
    num_left_out = 0
    if shape.has_unseen:
        gap = tl.minimum(tl.maximum(tl.load(rows.unseen + row * 2), first), length)
        num_left_out = tl.minimum(tl.maximum(tl.load(rows.unseen + row * 2 + 1), gap), length) - gap
    num = length - first - num_left_out
    if shape.has_picks:
        num = tl.minimum(tl.load(rows.num_picks + row * shape.num_kv_heads + kv_head), most_picks)
    return num, (length, first, gap, num_left_out)


@triton.jit
def numbered(rows: Rows, entry_S: tl.tensor, is_entry_S: tl.tensor, span: tl.tuple, shape: tl.constexpr) -> tl.tuple:
    """Return the key index for each entry of a list of keys, and a mask that is True for valid keys. `span`: the number
    of keys of the sequence, the index of the first key to which some query may attend, the index of the first excluded
    key, and the number of excluded keys. `entry_S`: index of each entry in the list. If keys are selected, it is
    instead the index in `rows.picks`, which contains the lists of all sequences and kv heads one after another."""
    length, first, gap, num_left_out = span
    if shape.has_picks:
        key_S = tl.load(rows.picks + entry_S, mask=is_entry_S, other=-1)
        is_key_S = (key_S >= first) & (key_S < length) & ((key_S < gap) | (key_S >= gap + num_left_out))
    else:
        key_S = (first + entry_S).to(tl.int32)
        key_S += tl.where(key_S >= gap, num_left_out, 0)
        is_key_S = is_entry_S
    return key_S, is_key_S


@triton.jit
def placed(pages: Pages, table: tl.tensor, key_S: tl.tensor, is_key_S: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """Return, for each key, the offset of its data from the start of the memory of pages, in elements. The data starts
    with K of the first kv head. `table` is the block table of the sequence, and `key_S` contains the keys' indices in
    the sequence."""
    page_S = tl.load(table + key_S // shape.page_tokens, mask=is_key_S, other=0).to(tl.int64)
    token_S = key_S % shape.page_tokens
    return page_S * pages.page_stride + token_S * (2 * shape.num_kv_heads * shape.head_dim)


@triton.jit
def placed_tile(pages: Pages, table: tl.tensor, place: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """Return, for each key of a tile, the offset of its data from the start of the memory of pages, in elements. The
    data starts with K of the first kv head. The keys are consecutive and in one page, so the page number is read only
    once. `place` is the index of the tile's first key in its sequence."""
    page = tl.load(table + place // shape.page_tokens).to(tl.int64)
    token_S = place % shape.page_tokens + tl.arange(0, shape.tile_keys)
    return page * pages.page_stride + token_S * (2 * shape.num_kv_heads * shape.head_dim)


@triton.jit(do_not_specialize=["most_picks"])
def attend_split(inputs: Inputs, rows: Rows, results: Results, most_picks: int, shape: tl.constexpr) -> None:
    """Kernel that computes the attention of one tile to one split. A tile contains pairs of a query and a head, for one
    sequence and kv head. A split is a part of the list of keys of this sequence and kv head. `most_picks` is the
    maximum number of selected keys of a kv head. Grid: (B, G * tiles of a kv head, number of splits)."""
    q, pages = inputs
    row = tl.program_id(0)
    kv_head = tl.program_id(1) % shape.num_kv_heads
    split = tl.program_id(2)
    start = tl.load(rows.starts + row)
    num_queries = tl.load(rows.starts + row + 1) - start
    num, span = listed(rows, row, kv_head, most_picks, shape)
    begin = split * shape.split_keys
    first_index = (tl.program_id(1) // shape.num_kv_heads) * shape.tile_rows
    if (first_index >= num_queries * shape.group) | ((split > 0) & (begin >= num)):
        return
    index_M = first_index + tl.arange(0, shape.tile_rows)
    is_pair_M, query_M = index_M < num_queries * shape.group, index_M // shape.group
    token_M = (tl.load(rows.firsts + row) + query_M).to(tl.int64)
    head_M = kv_head * shape.group + index_M % shape.group
    position_M = span[0] - num_queries + query_M
    dim_H = tl.arange(0, shape.head_pad)
    is_dim_H = dim_H < shape.head_dim
    is_o_MH = is_pair_M[:, None] & is_dim_H[None, :]
    at_M = token_M * q.token_stride + head_M * q.head_stride
    q_MH = tl.load(q.data + at_M[:, None] + dim_H[None, :], mask=is_o_MH, other=0.0)

    largest_M, total_M, sum_MH = begun(shape.tile_rows, shape.head_pad)
    end = tl.minimum(num, begin + shape.split_keys)
    list_at = (row * shape.num_kv_heads + kv_head).to(tl.int64) * most_picks
    table = rows.table + row * rows.table_stride
    for place in range(begin, end, shape.tile_keys):
        place_S = place + tl.arange(0, shape.tile_keys)
        if shape.in_one_page:
            key_S, is_key_S = place_S, place_S < end
            at_S = placed_tile(pages, table, place, shape) + kv_head * shape.head_dim
        else:
            key_S, is_key_S = numbered(rows, list_at + place_S, place_S < end, span, shape)
            at_S = placed(pages, table, key_S, is_key_S, shape) + kv_head * shape.head_dim
        is_here_SH = is_key_S[:, None] & is_dim_H[None, :]
        k_SH = tl.load(pages.data + at_S[:, None] + dim_H[None, :], mask=is_here_SH, other=0.0)
        sees_MS = is_key_S[None, :] & (key_S[None, :] <= position_M[:, None])
        if shape.window > 0:
            sees_MS = sees_MS & (key_S[None, :] > position_M[:, None] - shape.window)
        score_MS = product(q_MH, tl.trans(k_SH), shape.widen) * shape.scale
        score_MS = tl.where(sees_MS, score_MS, float("-inf"))
        weight_MS, shrink_M, largest_M, total_M = weighed(score_MS, largest_M, total_M)
        at_S += shape.num_kv_heads * shape.head_dim
        v_SH = tl.load(pages.data + at_S[:, None] + dim_H[None, :], mask=is_here_SH, other=0.0)
        sum_MH = sum_MH * shrink_M[:, None] + product(weight_MS.to(v_SH.dtype), v_SH, shape.widen)

    o_MH, lse_M = ended(largest_M, total_M, sum_MH)
    if shape.is_split:
        pair_M = (start + query_M).to(tl.int64) * (shape.num_kv_heads * shape.group) + head_M
        part_M = pair_M * tl.num_programs(2) + split
        tl.store(results.part_o + part_M[:, None] * shape.head_dim + dim_H[None, :], o_MH, mask=is_o_MH)
        tl.store(results.part_lse + part_M, lse_M, mask=is_pair_M)
    else:
        pair_M = token_M * (shape.num_kv_heads * shape.group) + head_M
        at_MH = pair_M[:, None] * shape.head_dim + dim_H[None, :]
        tl.store(results.o + at_MH, o_MH.to(results.o.dtype.element_ty), mask=is_o_MH)


@triton.jit(do_not_specialize=["most_picks", "num_splits"])
def merge_splits(rows: Rows, results: Results, most_picks: int, num_splits: int, shape: tl.constexpr) -> None:
    """Kernel that merges the results of all splits (parts of the list of keys) for one query and head. Grid: (B, N,
    most queries of a sequence)."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    query = tl.program_id(2)
    start = tl.load(rows.starts + row)
    if query >= tl.load(rows.starts + row + 1) - start:
        return
    num, _span = listed(rows, row, head // shape.group, most_picks, shape)
    num_parts = tl.maximum((num + shape.split_keys - 1) // shape.split_keys, 1)
    part = (start + query).to(tl.int64) * (shape.num_kv_heads * shape.group) + head
    dim_H = tl.arange(0, shape.head_pad)
    is_dim_H = dim_H < shape.head_dim
    largest_1, total_1, sum_1H = begun(1, shape.head_pad)
    for first in range(0, num_parts, MERGED):
        part_X = first + tl.arange(0, MERGED)
        is_part_X = part_X < num_parts
        at_X = part * num_splits + part_X
        score_X = tl.load(results.part_lse + at_X, mask=is_part_X, other=float("-inf"))
        weight_1X, shrink_1, largest_1, total_1 = weighed(score_X[None, :], largest_1, total_1)
        at_XH = at_X[:, None] * shape.head_dim + dim_H[None, :]
        o_XH = tl.load(results.part_o + at_XH, mask=is_part_X[:, None] & is_dim_H[None, :], other=0.0)
        sum_1H = sum_1H * shrink_1[:, None] + tl.sum(weight_1X[:, :, None] * o_XH[None, :, :], 1)
    o_1H, _lse_1 = ended(largest_1, total_1, sum_1H)
    pair = (tl.load(rows.firsts + row) + query).to(tl.int64) * (shape.num_kv_heads * shape.group) + head
    one_1 = tl.arange(0, 1)
    o_1H = o_1H.to(results.o.dtype.element_ty)
    tl.store(results.o + (pair * shape.head_dim + one_1)[:, None] + dim_H[None, :], o_1H, mask=is_dim_H[None, :])
