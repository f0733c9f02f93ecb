"""Causal attention over a list of KV segments, merged by log-sum-exp: nothing is concatenated or copied to attend.

Masks follow from absolute positions alone: a query at position p sees a key at position j iff j <= p and, with a
sliding window w, j > p - w. So one routine serves whole prefill, a chain's chunk (own rows causal, received rows
dense), chunked local prefill, multi-token verify and single-token decode. torch's SDPA masks rectangles top-left
(`is_causal=True`), which is wrong here; only square blocks are ever given to it as causal.

Merging partial results (o1, l1), (o2, l2) with l the log-sum-exp of scores:
    l = logaddexp(l1, l2),  o = o1 + (o2 - o1) * exp(l2 - l)      in fp32.

T query tokens, S keys, N heads, G kv heads, R = N / G query heads a kv head, H head dim.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from modeling.kernels import native
from modeling.kernels.products import best_product
from modeling.kv_buffers import KvRows

Kernel = Callable[[Tensor, KvRows, bool, Tensor | None], tuple[Tensor, Tensor]]
"""(q_TNH, rows, is_square_causal, mask_TS or None) -> (o_TNH in q's dtype, lse_TN in fp32). True in mask = visible."""

_QUERY_BLOCK = 512
_HEAD_DIM_STEP = 16
"""Of the kernels in C++: lanes of their widest registers."""
_NOTHING = -1e30
"""Log-sum-exp over no key: finite, so that two of them merge without NaN."""


def cpu_flash_kernel(q_TNH: Tensor, rows: KvRows, causal: bool, mask_TS: Tensor | None) -> tuple[Tensor, Tensor]:
    """Torch's flash attention for CPU; grouped heads share K and V by a zero stride, not by copies."""
    T, N, H = q_TNH.shape
    S, G, _ = rows.k_SGH.shape
    k_G1SH = rows.k_SGH.permute(1, 0, 2).unsqueeze(1)
    v_G1SH = rows.v_SGH.permute(1, 0, 2).unsqueeze(1)
    if T == 1:  # the R heads of a group as query rows of one head: measured 5x faster in bf16
        q_G1RH = q_TNH.reshape(G, 1, N // G, H)
        o_G1RH, lse_G1R = _cpu_flash(q_G1RH, k_G1SH, v_G1SH)
        return o_G1RH.reshape(1, N, H), lse_G1R.reshape(1, N)
    q_GRTH = q_TNH.view(T, G, N // G, H).permute(1, 2, 0, 3)
    shape = (G, N // G, S, H)
    bias = None
    if mask_TS is not None:
        bias = torch.zeros(mask_TS.shape, dtype=q_TNH.dtype).masked_fill_(~mask_TS, float("-inf"))
    o_GRTH, lse_GRT = _cpu_flash(q_GRTH, k_G1SH.expand(shape), v_G1SH.expand(shape), 0.0, causal, attn_mask=bias)
    return o_GRTH.permute(2, 0, 1, 3).reshape(T, N, H), lse_GRT.permute(2, 0, 1).reshape(T, N)


_cpu_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def plain_kernel(q_TNH: Tensor, rows: KvRows, causal: bool, mask_TS: Tensor | None) -> tuple[Tensor, Tensor]:
    """Plain matmuls with fp32 scores, any device: the reference, and the fallback. Blocked over queries."""
    T, N, H = q_TNH.shape
    S, G, _ = rows.k_SGH.shape
    if causal:
        mask_TS = torch.ones(T, S, dtype=torch.bool, device=q_TNH.device).tril()
    k_GHS = rows.k_SGH.float().permute(1, 2, 0)
    v_GSH = rows.v_SGH.float().permute(1, 0, 2)
    outs, lses = [], []
    for start in range(0, T, _QUERY_BLOCK):
        block_TNH = q_TNH[start : start + _QUERY_BLOCK]
        t = block_TNH.shape[0]
        q_GMH = block_TNH.float().view(t, G, N // G, H).permute(1, 2, 0, 3).reshape(G, -1, H)
        scores_GRTS = (q_GMH @ k_GHS).mul_(H**-0.5).view(G, N // G, t, S)
        if mask_TS is not None:
            scores_GRTS.masked_fill_(~mask_TS[start : start + t], float("-inf"))
        lse_GRT = scores_GRTS.logsumexp(-1)
        weights_GRTS = (scores_GRTS - lse_GRT.unsqueeze(-1)).exp_()
        o_GRTH = (weights_GRTS.view(G, -1, S) @ v_GSH).view(G, N // G, t, H)
        outs.append(o_GRTH.permute(2, 0, 1, 3).reshape(t, N, H))
        lses.append(lse_GRT.permute(2, 0, 1).reshape(t, N))
    return torch.cat(outs).to(q_TNH.dtype), torch.cat(lses)


def native_kernel(q_TNH: Tensor, rows: KvRows, causal: bool, mask_TS: Tensor | None) -> tuple[Tensor, Tensor]:
    """Ours in C++ for many queries on a CPU (modeling/kernels/prefill_attention.cpp); torch's for all else. To be used
    where `has_native_kernel`."""
    T, _, H = q_TNH.shape
    if T == 1 or mask_TS is not None or not is_native(q_TNH.dtype, H):
        return cpu_flash_kernel(q_TNH, rows, causal, mask_TS)
    o_TNH, lse_TN = torch.ops.baton.prefill_attention(q_TNH, rows.k_SGH, rows.v_SGH, causal, best_product())
    return o_TNH, lse_TN


def is_native(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernels in C++ take such queries and keys."""
    return dtype in (torch.bfloat16, torch.float32) and head_dim % _HEAD_DIM_STEP == 0


def has_native_kernel() -> bool:
    """Whether `native_kernel` can run here; builds it at the first call."""
    return native.load("prefill_attention")


def default_kernel(device: torch.device, dtype: torch.dtype) -> Kernel:
    """The fastest kernel here for a device and dtype."""
    if device.type != "cpu":
        return plain_kernel
    is_ours = dtype in (torch.bfloat16, torch.float32) and has_native_kernel()
    return native_kernel if is_ours else cpu_flash_kernel


class Attention:
    """Attention of consecutive queries over segments that are added as they become available, in any order."""

    def __init__(self, q_TNH: Tensor, first_position: int, window: int | None, kernel: Kernel) -> None:
        self._q_TNH = q_TNH
        self._first = first_position
        self._window = window
        self._kernel = kernel
        self._o_TNH: Tensor | None = None
        self._lse_TN: Tensor | None = None

    def add(self, rows: KvRows) -> None:
        """Attends to the keys of `rows`; segments of one attention must not overlap, and one must hold a query's own
        key. Keys that no query may see are skipped."""
        num_queries = self._q_TNH.shape[0]
        if self._window is not None:
            rows = rows.slice(self._first - self._window + 1, rows.end_position)
        rows = rows.slice(0, self._first + num_queries)
        if num_queries == 1 or rows.end_position <= self._first:
            parts = [rows]
        else:  # what lies before the first query is dense, the rest masked
            parts = [rows.slice(0, self._first), rows.slice(self._first, rows.end_position)]
        for part in parts:
            if part.k_SGH.shape[0]:
                self._merge(*self._block(part))

    def result(self) -> Tensor:
        """The attention output `[T, N, H]` over all that was added, in the queries' dtype."""
        assert self._o_TNH is not None, "no visible key was added"
        return self._o_TNH.to(self._q_TNH.dtype)

    def _block(self, rows: KvRows) -> tuple[Tensor, Tensor]:
        num_queries, num_keys = self._q_TNH.shape[0], rows.k_SGH.shape[0]
        last = self._first + num_queries - 1
        window_hides = self._window is not None and rows.first_position <= last - self._window
        if not window_hides:
            if rows.end_position <= self._first + 1:
                return self._kernel(self._q_TNH, rows, False, None)
            if rows.first_position == self._first and num_keys == num_queries:
                return self._kernel(self._q_TNH, rows, True, None)
        visible_TS = self._visible(rows)
        o_TNH, lse_TN = self._kernel(self._q_TNH, rows, False, visible_TS)
        blind_T = ~visible_TS.any(1)  # kernels return NaN for a query that sees nothing here; it must weigh nothing
        return o_TNH.masked_fill(blind_T[:, None, None], 0.0), lse_TN.masked_fill(blind_T[:, None], _NOTHING)

    def _visible(self, rows: KvRows) -> Tensor:
        device = self._q_TNH.device
        q_T1 = torch.arange(self._first, self._first + self._q_TNH.shape[0], device=device).unsqueeze(1)
        k_S = torch.arange(rows.first_position, rows.end_position, device=device)
        visible_TS = k_S <= q_T1
        if self._window is not None:
            visible_TS &= k_S > q_T1 - self._window
        return visible_TS

    def _merge(self, o_TNH: Tensor, lse_TN: Tensor) -> None:
        if self._o_TNH is None or self._lse_TN is None:
            self._o_TNH, self._lse_TN = o_TNH, lse_TN
            return
        total_TN = torch.logaddexp(self._lse_TN, lse_TN)
        weight_TN1 = (lse_TN - total_TN).exp_().unsqueeze(-1)
        self._o_TNH = torch.lerp(self._o_TNH.float(), o_TNH.float(), weight_TN1)
        self._lse_TN = total_TN


def attend(
    q_TNH: Tensor, first_position: int, segments: Iterable[KvRows], window: int | None, kernel: Kernel
) -> Tensor:
    """Attention of `q_TNH` (positions from `first_position`) over all `segments`: `[T, N, H]` in q's dtype."""
    attention = Attention(q_TNH, first_position, window, kernel)
    for rows in segments:
        attention.add(rows)
    return attention.result()
