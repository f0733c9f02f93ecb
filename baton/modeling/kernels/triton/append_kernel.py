"""Triton kernel that writes the keys and values of new tokens to the pages of their sequences. Imports Triton.

Shape letters: B sequences, G kv heads (padded), H head dim (padded).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from baton.modeling.kernels.triton.heads import Heads


@dataclass(frozen=True)
class AppendShape:
    """Compile-time parameters of the kernel. Each combination of values is compiled separately."""

    num_kv_heads: int
    heads_pad: int
    head_dim: int
    head_pad: int
    page_tokens: int
    most_queries: int


class Places(NamedTuple):
    """Kernel argument: address of the pages, stride of a page in elements, and addresses of the tensors of
    `StepRows`."""

    data: Any
    page_stride: int
    table: Any
    table_stride: int
    lengths: Any
    starts: Any


@triton.jit
def append_token(k: Heads, v: Heads, places: Places, shape: tl.constexpr) -> None:
    """Kernel that writes the key and value of one new token. Grid: (B * most_queries,)."""
    row = tl.program_id(0) // shape.most_queries
    query = tl.program_id(0) % shape.most_queries
    start = tl.load(places.starts + row)
    num_queries = tl.load(places.starts + row + 1) - start
    if query >= num_queries:
        return
    key = tl.load(places.lengths + row) - num_queries + query
    page = tl.load(places.table + row * places.table_stride + key // shape.page_tokens).to(tl.int64)
    head_G = tl.arange(0, shape.heads_pad)
    dim_H = tl.arange(0, shape.head_pad)
    is_here_GH = (head_G < shape.num_kv_heads)[:, None] & (dim_H < shape.head_dim)[None, :]
    token = (start + query).to(tl.int64)
    k_at = k.data + token * k.token_stride
    v_at = v.data + token * v.token_stride
    k_GH = tl.load(k_at + head_G[:, None] * k.head_stride + dim_H[None, :], mask=is_here_GH)
    v_GH = tl.load(v_at + head_G[:, None] * v.head_stride + dim_H[None, :], mask=is_here_GH)
    to = places.data + page * places.page_stride
    to += (key % shape.page_tokens) * (2 * shape.num_kv_heads * shape.head_dim)
    at_GH = head_G[:, None] * shape.head_dim + dim_H[None, :]
    tl.store(to + at_GH, k_GH, mask=is_here_GH)
    tl.store(to + shape.num_kv_heads * shape.head_dim + at_GH, v_GH, mask=is_here_GH)
