"""Triton kernel of prefill attention. A program computes the attention of a block of queries of one head to a segment
of keys. Imports Triton.

Shape letters: T queries, N heads, R heads that share a kv head, H head dim (padded), M queries of a program, S keys of
a tile.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from baton.modeling.kernels.triton.heads import Heads
from baton.modeling.kernels.triton.softmax import LN_2, begun, ended, product, weighed


@dataclass(frozen=True)
class PrefillShape:
    """Compile-time parameters of the kernel. Each combination of values is compiled separately."""

    group: int
    """Number of query heads that share a kv head."""
    head_dim: int
    head_pad: int
    is_causal: bool
    has_mask: bool
    tile_rows: int
    tile_keys: int
    scale: float
    """Factor on the scores: log2(e) / sqrt(head dim). The softmax uses powers of two."""
    widen: bool
    """True if operands of matrix products are converted to fp32. Triton's interpreter needs this for bf16."""


class Segment(NamedTuple):
    """Kernel argument: queries, keys and values, and the addresses of the results `[T, N, H]`, the log-sum-exps `[T,
    N]` and the mask `[T, S]`."""

    q: Heads
    k: Heads
    v: Heads
    o: Any
    lse: Any
    mask: Any


class Block(NamedTuple):
    """Block of queries of one head, and the keys to which the queries attend."""

    segment: Segment
    q_MH: Any
    kv_head: Any
    query_M: Any
    """Indices of the block's queries among all queries."""
    is_query_M: Any
    """True for queries that exist, False for padding of the block."""
    mask_stride: Any
    end: Any
    """Index after the last key to which some query of the block attends."""


@triton.jit
def loaded(heads: Heads, head: tl.tensor, token_X: tl.tensor, is_token_X: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """Load one head of several tokens, `[X, H]`. Padding is filled with zeros."""
    dim_H = tl.arange(0, shape.head_pad)
    at_X = token_X.to(tl.int64) * heads.token_stride + head * heads.head_stride
    is_here_XH = is_token_X[:, None] & (dim_H < shape.head_dim)[None, :]
    return tl.load(heads.data + at_X[:, None] + dim_H[None, :], mask=is_here_XH, other=0.0)


@triton.jit
def attended(block: Block, first: tl.tensor, state: tl.tuple, is_masked: tl.constexpr, shape: tl.constexpr) -> tl.tuple:
    """Attend to one tile of keys, and return the updated state of the online softmax. `first` is the index of the first
    key of the tile. `state` contains the largest scores, the totals of weights and the weighted sums. If `is_masked` is
    False, all queries attend to all keys of the tile."""
    segment, q_MH, kv_head, query_M, is_query_M, mask_stride, end = block
    largest_M, total_M, sum_MH = state
    key_S = first + tl.arange(0, shape.tile_keys)
    is_key_S = key_S < end
    k_SH = loaded(segment.k, kv_head, key_S, is_key_S, shape)
    score_MS = product(q_MH, tl.trans(k_SH), shape.widen) * shape.scale
    if is_masked:
        sees_MS = is_key_S[None, :] & is_query_M[:, None]
        if shape.is_causal:
            sees_MS = sees_MS & (key_S[None, :] <= query_M[:, None])
        if shape.has_mask:
            mask_MS = segment.mask + query_M.to(tl.int64)[:, None] * mask_stride + key_S[None, :]
            sees_MS = sees_MS & (tl.load(mask_MS, mask=sees_MS, other=0) != 0)
        score_MS = tl.where(sees_MS, score_MS, float("-inf"))
    weight_MS, shrink_M, largest_M, total_M = weighed(score_MS, largest_M, total_M)
    v_SH = loaded(segment.v, kv_head, key_S, is_key_S, shape)
    sum_MH = sum_MH * shrink_M[:, None] + product(weight_MS.to(v_SH.dtype), v_SH, shape.widen)
    return largest_M, total_M, sum_MH


@triton.jit(do_not_specialize=["num_queries", "num_keys", "mask_stride"])
def attend_block(segment: Segment, num_queries: int, num_keys: int, mask_stride: int, shape: tl.constexpr) -> None:
    """Kernel that computes the attention of one block of queries of one head. Grid: (blocks of queries, N). Other
    values of the integers do not cause the kernel to be compiled again."""
    number = tl.num_programs(0) - 1 - tl.program_id(0)  # blocks with the most keys first, those with the fewest last
    head = tl.program_id(1)
    query_M = number * shape.tile_rows + tl.arange(0, shape.tile_rows)
    is_query_M = query_M < num_queries
    end = num_keys
    if shape.is_causal:
        last = tl.minimum((number + 1) * shape.tile_rows, num_queries) - 1
        end = tl.minimum(num_keys, last + 1)
    q_MH = loaded(segment.q, head, query_M, is_query_M, shape)
    state = begun(shape.tile_rows, shape.head_pad)
    block = Block(segment, q_MH, head // shape.group, query_M, is_query_M, mask_stride, end)
    seen_by_all = 0
    if not shape.has_mask:
        seen_by_all = end
        if shape.is_causal:
            seen_by_all = tl.minimum(end, number * shape.tile_rows + 1)
        seen_by_all = seen_by_all // shape.tile_keys * shape.tile_keys
    for first in range(0, seen_by_all, shape.tile_keys):
        state = attended(block, first, state, False, shape)
    for first in range(seen_by_all, end, shape.tile_keys):
        state = attended(block, first, state, True, shape)
    largest_M, total_M, sum_MH = state

    o_MH, lse_M = ended(largest_M, total_M, sum_MH)
    dim_H = tl.arange(0, shape.head_pad)
    pair_M = query_M.to(tl.int64) * tl.num_programs(1) + head
    at_MH = pair_M[:, None] * shape.head_dim + dim_H[None, :]
    is_o_MH = is_query_M[:, None] & (dim_H < shape.head_dim)[None, :]
    tl.store(segment.o + at_MH, o_MH.to(segment.o.dtype.element_ty), mask=is_o_MH)
    tl.store(segment.lse + pair_M, lse_M * LN_2, mask=is_query_M)
