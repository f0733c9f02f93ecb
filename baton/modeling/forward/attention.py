"""Causal attention over a list of KV segments. Partial results are merged by their log-sum-exp, so keys are never
concatenated or copied.

`decoder` and `prefill_workers` call this module on their engine's thread.

Masks depend only on absolute positions: a query at position p attends to a key at position j if j <= p and, with a
sliding window of w tokens, j > p - w. One function therefore serves whole prefill, a chunk of a prefill chain, chunked
local prefill, multi-token verification and single-token decode. A prefill chain is a group of workers that compute one
prompt together. Each worker computes one chunk of the prompt. Attention is then causal for the chunk's own keys and
dense for received keys.

If the numbers of queries and keys differ, the option `is_causal=True` of torch's SDPA lets query t attend to keys 0 to
t, which is wrong here. The option is used only for equal numbers.

Two partial results (o1, l1) and (o2, l2), where o is the output and l the log-sum-exp of the scores, are merged in
fp32:

    l = logaddexp(l1, l2),  o = o1 + (o2 - o1) * exp(l2 - l)

Shape letters: T query tokens, S keys, N heads, G kv heads, R = N / G query heads per kv head, H head dim.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from baton.modeling.device.port import Device
from baton.modeling.kernels import native
from baton.modeling.kernels.process_kernels import KERNELS
from baton.modeling.kv.buffers import KvRows

Partial = tuple[Tensor, Tensor]
"""Attention over a subset of the keys: the output o_TNH, and the log-sum-exp lse_TN of the scores. o_TNH has the dtype
of the queries, or fp32 after merging. lse_TN is fp32."""
Kernel = Callable[[Tensor, Sequence[KvRows], bool, Tensor | None], Partial]
"""Function (q_TNH, pieces, is_causal, mask_TS). `pieces` are sets of keys and values that do not overlap. All queries
attend to all keys of all pieces, with two exceptions. If `is_causal` is True, the last piece is masked causally, and
its number of keys equals the number of queries. If `mask_TS` is not None, there is only one piece, and queries attend
to the keys for which the mask is True."""

_QUERY_BLOCK = 512
_HEAD_DIM_STEP = 16
"""The C++ kernels require a head dim that is a multiple of this number: the number of fp32 lanes of their widest
registers."""
_NOTHING = -1e30
"""Log-sum-exp of an empty set of keys. It is finite instead of -infinity, because merging two infinities would give
NaN."""


def merged(first: Partial, second: Partial) -> Partial:
    """Merge two partial results, and return the attention over the keys of both."""
    (o_TNH, lse_TN), (other_TNH, other_TN) = first, second
    total_TN = torch.logaddexp(lse_TN, other_TN)
    weight_TN1 = (other_TN - total_TN).exp_().unsqueeze(-1)
    return torch.lerp(o_TNH.float(), other_TNH.float(), weight_TN1), total_TN


def piece_by_piece(kernel: Callable[[Tensor, KvRows, bool, Tensor | None], Partial]) -> Kernel:
    """Convert a kernel for one set of keys and values to a Kernel for a list of such sets (pieces). The Kernel calls
    `kernel` for each piece and merges the results."""

    @functools.wraps(kernel)
    def run(q_TNH: Tensor, pieces: Sequence[KvRows], causal: bool, mask_TS: Tensor | None) -> Partial:
        *dense, last = pieces
        parts = [kernel(q_TNH, each, False, None) for each in dense]
        o_TNH, lse_TN = functools.reduce(merged, [*parts, kernel(q_TNH, last, causal, mask_TS)])
        return o_TNH.to(q_TNH.dtype), lse_TN

    return run


@piece_by_piece
def cpu_flash_kernel(q_TNH: Tensor, rows: KvRows, causal: bool, mask_TS: Tensor | None) -> Partial:
    """Return the attention to one set of keys, computed with torch's flash attention for CPUs. K and V are not copied:
    the query heads of a group share them through a view with stride zero."""
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


@piece_by_piece
def plain_kernel(q_TNH: Tensor, rows: KvRows, causal: bool, mask_TS: Tensor | None) -> Partial:
    """Return the attention to one set of keys, computed with plain matrix products and fp32 scores, in blocks of
    queries. Works on any device. It is the reference for other kernels, and the fallback."""
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


def native_kernel(q_TNH: Tensor, pieces: Sequence[KvRows], causal: bool, mask_TS: Tensor | None) -> Partial:
    """Return the attention to all pieces (sets of keys), computed with the C++ kernel. Torch's kernel is used instead
    for a single query, with a mask, or if the dtype or head dim is not supported. Call `native.load()` before."""
    T, _, H = q_TNH.shape
    if T == 1 or mask_TS is not None or not is_native(q_TNH.dtype, H):
        return cpu_flash_kernel(q_TNH, pieces, causal, mask_TS)
    keys, values = [each.k_SGH for each in pieces], [each.v_SGH for each in pieces]
    return native.operators().prefill_attention(q_TNH, keys, values, causal, KERNELS.choice.attention)


def is_native(dtype: torch.dtype, head_dim: int) -> bool:
    """Return True if the C++ kernels support queries and keys of this dtype and head dim."""
    return dtype in (torch.bfloat16, torch.float32) and head_dim % _HEAD_DIM_STEP == 0


def on_device(kernel: Kernel, device: Device) -> Kernel:
    """Return a kernel that raises WrongMemoryError unless all keys are in the device's memory, and otherwise calls
    `kernel`. On a device that computes in host memory, `kernel` itself is returned."""
    if device.is_home:
        return kernel

    @functools.wraps(kernel)
    def run(q_TNH: Tensor, pieces: Sequence[KvRows], causal: bool, mask_TS: Tensor | None) -> Partial:
        for k_SGH in (rows.k_SGH for rows in pieces if len(rows.k_SGH)):
            device.require(k_SGH.data_ptr(), (k_SGH.stride(0) * (len(k_SGH) - 1) + 1) * k_SGH.element_size())
        return kernel(q_TNH, pieces, causal, mask_TS)

    return run


def default_kernel(device: torch.device, dtype: torch.dtype) -> Kernel:
    """Return the fastest available kernel for a device and dtype. Triton kernels are not considered."""
    if device.type != "cpu":
        return plain_kernel
    is_ours = dtype in (torch.bfloat16, torch.float32) and native.load()
    return native_kernel if is_ours else cpu_flash_kernel


class Attention:
    """Attention of consecutive queries to segments of keys. Segments may be added in any order, as soon as they are
    available."""

    def __init__(self, q_TNH: Tensor, first_position: int, window: int | None, kernel: Kernel) -> None:
        self._q_TNH = q_TNH
        self._first = first_position
        self._window = window
        self._kernel = kernel
        self._found: Partial | None = None

    def add(self, *segments: KvRows) -> None:
        """Attend to the keys of `segments`, whose contents must be available. The segments of one Attention must not
        overlap. Each query's own key must be in one of them. Keys that no query attends to are skipped."""
        dense: list[KvRows] = []
        for rows in segments:
            for part in self._parts(rows):
                if self._sees_all(part):
                    dense.append(part)
                else:
                    self._take(self._partly_seen(part, dense))
        if dense:
            self._take(self._kernel(self._q_TNH, dense, False, None))

    def result(self) -> Tensor:
        """Return the attention output `[T, N, H]` over all added segments, in the dtype of the queries."""
        assert self._found is not None, "no visible key was added"
        return self._found[0].to(self._q_TNH.dtype)

    def _parts(self, rows: KvRows) -> list[KvRows]:
        """Return the keys that at least one query attends to. Keys before the first query are returned as a separate
        piece."""
        if self._window is not None:
            rows = rows.slice(self._first - self._window + 1, rows.end_position)
        rows = rows.slice(0, self._first + len(self._q_TNH))
        parts = [rows.slice(0, self._first), rows.slice(self._first, rows.end_position)]
        if len(self._q_TNH) == 1 or not len(parts[0].k_SGH):
            parts = [rows]
        return [part for part in parts if len(part.k_SGH)]

    def _sees_all(self, rows: KvRows) -> bool:
        return rows.end_position <= self._first + 1 and not self._is_windowed(rows)

    def _is_windowed(self, rows: KvRows) -> bool:
        last = self._first + len(self._q_TNH) - 1
        return self._window is not None and rows.first_position <= last - self._window

    def _partly_seen(self, rows: KvRows, dense: list[KvRows]) -> Partial:
        """Attend to keys that only some of the queries attend to. If they form a causal square, also attend to the
        pieces in `dense`."""
        is_square = rows.first_position == self._first and len(rows.k_SGH) == len(self._q_TNH)
        if is_square and not self._is_windowed(rows):
            pieces = [*dense, rows]
            dense.clear()
            return self._kernel(self._q_TNH, pieces, True, None)
        visible_TS = self._visible(rows)
        o_TNH, lse_TN = self._kernel(self._q_TNH, [rows], False, visible_TS)
        blind_T = ~visible_TS.any(1)  # kernels return NaN for queries without keys here: give them no weight
        return o_TNH.masked_fill(blind_T[:, None, None], 0.0), lse_TN.masked_fill(blind_T[:, None], _NOTHING)

    def _visible(self, rows: KvRows) -> Tensor:
        device = self._q_TNH.device
        q_T1 = torch.arange(self._first, self._first + self._q_TNH.shape[0], device=device).unsqueeze(1)
        k_S = torch.arange(rows.first_position, rows.end_position, device=device)
        visible_TS = k_S <= q_T1
        if self._window is not None:
            visible_TS &= k_S > q_T1 - self._window
        return visible_TS

    def _take(self, found: Partial) -> None:
        self._found = found if self._found is None else merged(self._found, found)
