"""Invalid calls of the Triton operators, by the error that each must raise."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from baton.modeling.kernels.triton.append import append_kv
from baton.modeling.kernels.triton.decode import SeenKeys, decode_attention
from baton.modeling.kernels.triton.prefill import DENSE, Visibility, prefill_attention
from baton.modeling.kernels.triton.row_kernels import StepRows
from baton.modeling.kernels.triton.spans import SpanRows, span_attention
from baton.modeling.kernels.triton.tiles import PrefillTiles


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def whole(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


Q, PAGES, KV = zeros(2, 4, 16), zeros(3, 8, 2, 2, 16), zeros(5, 2, 16)


def rows() -> StepRows:
    """Return a step of two sequences with one new token each and two pages of eight tokens."""
    return StepRows(whole(2, 2), whole(2), whole(3), 1, 16)


def decode(q_TNH: Tensor = Q, pages: Tensor = PAGES, seen: SeenKeys | None = None) -> None:
    decode_attention(q_TNH, pages, rows(), seen or SeenKeys())


def prefill(q_TNH: Tensor = Q, k_SGH: Tensor = KV, v_SGH: Tensor = KV, seen: Visibility = DENSE) -> None:
    prefill_attention(q_TNH, k_SGH, v_SGH, seen)


def append(k_TGH: Tensor, v_TGH: Tensor, slots_U: Tensor | None = None) -> None:
    append_kv(k_TGH, v_TGH, PAGES, whole(2) if slots_U is None else slots_U)


def spans(q_TNH: Tensor = Q, blocks_X2: Tensor | None = None, **options: Any) -> None:
    blocks_X2 = whole(1, 2) if blocks_X2 is None else blocks_X2
    span_attention(q_TNH, PAGES, SpanRows(rows(), blocks_X2, PrefillTiles(16, 16, num_warps=4)), **options)


CALLS: dict[str, Callable[[], object]] = {
    "must be int32": lambda: replace(rows(), lengths_B=torch.zeros(2, dtype=torch.int64)),
    "table must be [2, pages]": lambda: replace(rows(), table_BC=whole(3, 2)),
    "a row of the table must be contiguous": lambda: replace(rows(), table_BC=whole(2, 2).T),
    "firsts must be [2]": lambda: replace(rows(), firsts_B=whole(3)),
    "starts must be [3]": lambda: replace(rows(), starts_E=whole(2)),
    "most_queries = 0": lambda: replace(rows(), most_queries=0),
    "most_keys = 0": lambda: replace(rows(), most_keys=0),
    "the table has room for 16 keys": lambda: decode_attention(Q, PAGES, replace(rows(), most_keys=17)),
    "pages must be [pages, tokens, 2, kv heads, head dim]": lambda: decode(pages=zeros(3, 8, 3, 2, 16)),
    "each page must be contiguous": lambda: decode(pages=zeros(3, 8, 2, 2, 32)[..., :16]),
    "pages are torch.float64": lambda: decode(pages=zeros(3, 8, 2, 2, 16, dtype=torch.float64)),
    "head dim is 8, that of the pages 16": lambda: decode(zeros(2, 4, 8)),
    "dtype is torch.float16": lambda: decode(zeros(2, 4, 16, dtype=torch.float16)),
    "each head must be contiguous": lambda: decode(zeros(2, 16, 4).transpose(1, 2)),
    "queries, keys and values are [tokens, heads, head dim]": lambda: decode(zeros(2, 64)),
    "3 heads do not share 2 kv heads": lambda: decode(zeros(2, 3, 16)),
    "window = 0": lambda: decode(seen=SeenKeys(window=0)),
    "picks must be [2, 2, K]": lambda: decode(seen=SeenKeys(picks=(whole(2, 3, 4), whole(2, 3)))),
    "picks and unseen must be int32": lambda: decode(seen=SeenKeys(picks=(zeros(2, 2, 4), whole(2, 2)))),
    "keys that rows leave out must be [2, 2]": lambda: decode(seen=SeenKeys(unseen_B2=whole(3, 2))),
    "must have one shape": lambda: prefill(v_SGH=zeros(4, 2, 16)),
    "head dim is 16, that of keys 8": lambda: prefill(k_SGH=zeros(5, 2, 8), v_SGH=zeros(5, 2, 8)),
    "4 heads do not share 3 kv heads": lambda: prefill(k_SGH=zeros(5, 3, 16), v_SGH=zeros(5, 3, 16)),
    "use bfloat16, float16 or float32 for all": lambda: prefill(zeros(2, 4, 16, dtype=torch.float16)),
    "a mask must be [2, 5], bool": lambda: prefill(seen=Visibility(mask_TS=zeros(2, 5))),
    "keys [2, 2, 16] and values [2, 2, 8]": lambda: append(zeros(2, 2, 16), zeros(2, 2, 8)),
    "slots are int32": lambda: append(zeros(2, 2, 16), zeros(2, 2, 16), torch.zeros(2)),
    "3 slots for the keys of 2 tokens": lambda: append(zeros(2, 2, 16), zeros(2, 2, 16), whole(3)),
    "window = -1": lambda: spans(window=-1),
    "blocks must be [X, 2]": lambda: spans(blocks_X2=whole(2, 3)),
    "the output must be [2, 4, 16]": lambda: spans(o_TNH=zeros(3, 4, 16)),
    "4 kv heads, and pages of 2": lambda: append(zeros(2, 4, 16), zeros(2, 4, 16)),
}
"""Invalid calls by the text that their error must contain."""


def refusal(text: str) -> str:
    """Make the call with key `text`, and return the text of its error; empty if it succeeds."""
    try:
        CALLS[text]()
    except RuntimeError as error:
        return str(error)
    return ""
