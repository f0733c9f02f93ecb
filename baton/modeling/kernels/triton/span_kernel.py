"""Triton kernel of prefill attention over pages. A program computes one block of queries of one sequence in one kv
head. Imports Triton.

A block contains M pairs of a query and one of the R heads that share the kv head, so keys are read only once for all of
these heads. Tiles of keys to which all queries of the block attend are computed without a mask.

Shape letters: T tokens, N heads, G kv heads, R = N / G, H head dim (padded), M pairs, S keys of a tile, X blocks.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from baton.modeling.kernels.triton.heads import Inputs, Pages
from baton.modeling.kernels.triton.softmax import begun, ended, product, weighed


@dataclass(frozen=True)
class SpanShape:
    """Compile-time parameters of the kernel. Each combination of values is compiled separately."""

    num_kv_heads: int
    group: int
    """Number of query heads that share a kv head."""
    head_dim: int
    head_pad: int
    page_tokens: int
    window: int
    """Sliding window: number of latest keys to which a query attends, including its own key. 0: all keys."""
    tile_rows: int
    tile_keys: int
    in_one_page: bool
    """True if the keys of each tile are adjacent within one page."""
    scale: float
    """Factor on the scores: log2(e) / sqrt(head dim). The softmax uses powers of two."""
    widen: bool
    """True if operands of matrix products are converted to fp32. Triton's interpreter needs this for bf16."""


class Spans(NamedTuple):
    """Kernel argument: addresses of the blocks of queries, and of the tensors of `StepRows`."""

    blocks: Any
    table: Any
    table_stride: int
    lengths: Any
    starts: Any
    firsts: Any


class QueryBlock(NamedTuple):
    """Block of queries of one sequence, and the keys to which the queries attend."""

    pages: Pages
    table: Any
    """Address of the block table of the sequence."""
    kv_head: Any
    q_MH: Any
    position_M: Any
    """Position of each query in its sequence."""
    begin: Any
    """Index of the first key to which some query of the block attends."""
    end: Any
    """Index after the last key to which some query of the block attends."""


@triton.jit
def loaded(block: QueryBlock, place: tl.tensor, is_masked: tl.constexpr, shape: tl.constexpr) -> tl.tuple:
    """Load the keys and values of one tile, each `[S, H]`. `place` is the index of the tile's first key in its
    sequence. Keys to which no query of the block attends are replaced by zeros if `is_masked` is set."""
    key_S = place + tl.arange(0, shape.tile_keys)
    is_key_S = (key_S >= block.begin) & (key_S < block.end)
    if shape.in_one_page:
        page = tl.load(block.table + place // shape.page_tokens).to(tl.int64)
        at_S = (place % shape.page_tokens + tl.arange(0, shape.tile_keys)) * (2 * shape.num_kv_heads * shape.head_dim)
        start = block.pages.data + page * block.pages.page_stride + block.kv_head * shape.head_dim
    else:
        page_S = tl.load(block.table + key_S // shape.page_tokens, mask=is_key_S, other=0).to(tl.int64)
        at_S = page_S * block.pages.page_stride + key_S % shape.page_tokens * (2 * shape.num_kv_heads * shape.head_dim)
        start = block.pages.data + block.kv_head * shape.head_dim
    dim_H = tl.arange(0, shape.head_pad)
    at_SH = start + at_S[:, None] + dim_H[None, :]
    v_at_SH = at_SH + shape.num_kv_heads * shape.head_dim
    if is_masked:
        is_here_SH = is_key_S[:, None] & (dim_H < shape.head_dim)[None, :]
        k_SH = tl.load(at_SH, mask=is_here_SH, other=0.0)
        v_SH = tl.load(v_at_SH, mask=is_here_SH, other=0.0)
    elif shape.head_pad == shape.head_dim:
        k_SH = tl.load(at_SH)
        v_SH = tl.load(v_at_SH)
    else:
        is_dim_1H = (dim_H < shape.head_dim)[None, :]
        k_SH = tl.load(at_SH, mask=is_dim_1H, other=0.0)
        v_SH = tl.load(v_at_SH, mask=is_dim_1H, other=0.0)
    return k_SH, v_SH


@triton.jit
def attended(
    block: QueryBlock, place: tl.tensor, state: tl.tuple, is_masked: tl.constexpr, shape: tl.constexpr
) -> tl.tuple:
    """Attend to one tile of keys, and return the updated state of the online softmax: the largest scores, the totals of
    weights and the weighted sums. `place` is the index of the tile's first key in its sequence. If `is_masked` is
    False, all queries attend to all keys of the tile."""
    largest_M, total_M, sum_MH = state
    k_SH, v_SH = loaded(block, place, is_masked, shape)
    score_MS = product(block.q_MH, tl.trans(k_SH), shape.widen) * shape.scale
    if is_masked:
        key_S = place + tl.arange(0, shape.tile_keys)
        sees_MS = key_S[None, :] <= block.position_M[:, None]
        if shape.window > 0:
            sees_MS = sees_MS & (key_S[None, :] > block.position_M[:, None] - shape.window)
        score_MS = tl.where(sees_MS, score_MS, float("-inf"))
    weight_MS, shrink_M, largest_M, total_M = weighed(score_MS, largest_M, total_M)
    sum_MH = sum_MH * shrink_M[:, None] + product(weight_MS.to(v_SH.dtype), v_SH, shape.widen)
    return largest_M, total_M, sum_MH


@triton.jit
def attend_span(inputs: Inputs, spans: Spans, o: tl.tensor, shape: tl.constexpr) -> None:
    """Kernel that computes the attention of one block of queries in one kv head. Grid: (X, G)."""
    q, pages = inputs
    row = tl.load(spans.blocks + tl.program_id(0) * 2)
    first_index = tl.load(spans.blocks + tl.program_id(0) * 2 + 1)
    kv_head = tl.program_id(1)
    start = tl.load(spans.starts + row)
    num_queries = tl.load(spans.starts + row + 1) - start
    before = tl.load(spans.lengths + row) - num_queries
    end_index = tl.minimum(first_index + shape.tile_rows, num_queries * shape.group)
    first_position = before + first_index // shape.group
    last_position = before + (end_index - 1) // shape.group

    index_M = first_index + tl.arange(0, shape.tile_rows)
    dim_H = tl.arange(0, shape.head_pad)
    is_here_MH = (index_M < end_index)[:, None] & (dim_H < shape.head_dim)[None, :]
    token_M = (tl.load(spans.firsts + row) + index_M // shape.group).to(tl.int64)
    head_M = kv_head * shape.group + index_M % shape.group
    at_M = token_M * q.token_stride + head_M * q.head_stride
    q_MH = tl.load(q.data + at_M[:, None] + dim_H[None, :], mask=is_here_MH, other=0.0)

    begin = first_position * 0
    clear_from = begin
    clear_to = (first_position + 1) // shape.tile_keys * shape.tile_keys
    if shape.window > 0:
        begin = tl.maximum(first_position - shape.window + 1, 0)
        clear_from = tl.cdiv(tl.maximum(last_position - shape.window + 1, 0), shape.tile_keys) * shape.tile_keys
        clear_from = tl.minimum(clear_from, clear_to)
    table = spans.table + row.to(tl.int64) * spans.table_stride
    block = QueryBlock(pages, table, kv_head, q_MH, before + index_M // shape.group, begin, last_position + 1)
    state = begun(shape.tile_rows, shape.head_pad)
    if shape.window > 0:
        for place in range(begin // shape.tile_keys * shape.tile_keys, clear_from, shape.tile_keys):
            state = attended(block, place, state, True, shape)
    for place in range(clear_from, clear_to, shape.tile_keys):
        state = attended(block, place, state, False, shape)
    for place in range(clear_to, last_position + 1, shape.tile_keys):
        state = attended(block, place, state, True, shape)
    largest_M, total_M, sum_MH = state

    o_MH, _lse_M = ended(largest_M, total_M, sum_MH)
    pair_M = token_M * (shape.num_kv_heads * shape.group) + head_M
    at_MH = pair_M[:, None] * shape.head_dim + dim_H[None, :]
    tl.store(o + at_MH, o_MH.to(o.dtype.element_ty), mask=is_here_MH)
