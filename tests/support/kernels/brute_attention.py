"""Attention by its definition, in float64, for one query and one head at a time. All kernels are checked against it."""

import math

import torch
from torch import Tensor

from baton.modeling.kv.buffers import KvRows


def brute_attention(
    q_TNH: Tensor, rows: KvRows, first_query: int, window: int | None = None, dense: bool = False
) -> tuple[Tensor, Tensor]:
    """Return `(o_TNH, lse_TN)` in float64. Queries have consecutive positions from `first_query`. `dense`: every query
    attends to all keys, regardless of positions. A query without visible keys gets output 0 and log-sum-exp minus
    infinity."""
    num_queries, num_heads, head_dim = q_TNH.shape
    group = num_heads // rows.k_SGH.shape[1]
    o_TNH = torch.zeros(q_TNH.shape, dtype=torch.float64)
    lse_TN = torch.full((num_queries, num_heads), -math.inf, dtype=torch.float64)
    for t in range(num_queries):
        position = first_query + t
        low = 0 if dense or window is None else max(position - window + 1 - rows.first_position, 0)
        high = rows.k_SGH.shape[0] if dense else min(position + 1 - rows.first_position, rows.k_SGH.shape[0])
        if low >= high:
            continue
        for head in range(num_heads):
            k_SH = rows.k_SGH[low:high, head // group].double().cpu()
            v_SH = rows.v_SGH[low:high, head // group].double().cpu()
            scores_S = k_SH @ q_TNH[t, head].double().cpu() / math.sqrt(head_dim)
            lse_TN[t, head] = scores_S.logsumexp(0)
            o_TNH[t, head] = (scores_S - lse_TN[t, head]).exp() @ v_SH
    return o_TNH, lse_TN
