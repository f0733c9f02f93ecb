"""Triton kernel that writes the keys and values of new tokens to the pages of their sequences. Imports Triton.

Shape letters: T tokens, G kv heads (padded), H head dim (padded).
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


class Places(NamedTuple):
    """Kernel argument: address of the pages, stride of a page in elements, and the address of the tokens' indices in
    the pages."""

    data: Any
    page_stride: int
    slots: Any


@triton.jit
def append_token(k: Heads, v: Heads, places: Places, shape: tl.constexpr) -> None:
    """Kernel that writes the key and value of one new token. Grid: (T,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(places.slots + token)
    if slot < 0:
        return
    head_G = tl.arange(0, shape.heads_pad)
    dim_H = tl.arange(0, shape.head_pad)
    is_here_GH = (head_G < shape.num_kv_heads)[:, None] & (dim_H < shape.head_dim)[None, :]
    k_at = k.data + token * k.token_stride
    v_at = v.data + token * v.token_stride
    k_GH = tl.load(k_at + head_G[:, None] * k.head_stride + dim_H[None, :], mask=is_here_GH)
    v_GH = tl.load(v_at + head_G[:, None] * v.head_stride + dim_H[None, :], mask=is_here_GH)
    to = places.data + (slot // shape.page_tokens).to(tl.int64) * places.page_stride
    to += (slot % shape.page_tokens) * (2 * shape.num_kv_heads * shape.head_dim)
    at_GH = head_G[:, None] * shape.head_dim + dim_H[None, :]
    tl.store(to + at_GH, k_GH, mask=is_here_GH)
    tl.store(to + shape.num_kv_heads * shape.head_dim + at_GH, v_GH, mask=is_here_GH)
