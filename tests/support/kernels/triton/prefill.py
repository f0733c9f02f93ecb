"""Checks of Triton's prefill attention over a segment of keys against the definition of attention in float64, query by
query.

Keys and values to which no query attends are NaN. T queries, S keys, N heads, G KV heads, H head dim.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from baton.modeling.forward.attention import merged
from baton.modeling.forward.triton.attention import triton_kernel
from baton.modeling.kernels.triton.prefill import Visibility, prefill_attention
from baton.modeling.kernels.triton.tiles import PrefillTiles
from baton.modeling.kv.buffers import KvRows
from tests.support.kernels.covering import Levels
from tests.support.kernels.segments import attend
from tests.support.kernels.triton.decode import TOLERANCES

LEVELS: Levels = {
    "dtype": tuple(TOLERANCES),
    "num_queries": (1, 2, 16, 37),
    "num_keys": (1, 15, 16, 50),
    "group": (1, 2, 3, 4, 8, 16),
    "num_kv_heads": (1, 2),
    "head_dim": (64, 80, 96, 128, 192, 256),
    "first_query": (0, 7, 40),
    "first_key": (0, 7),
    "is_causal": (False, True),
    "window": (None, 1, 9, 1000),
    "tile_keys": (None, 16, 32),
    "is_view": (False, True),
}
"""Levels of each field of PrefillCase."""


@dataclass(frozen=True)
class PrefillCase:
    """One call of prefill attention."""

    dtype: torch.dtype = torch.float32
    num_queries: int = 37
    num_keys: int = 50
    group: int = 3
    num_kv_heads: int = 2
    head_dim: int = 64
    first_query: int = 7
    first_key: int = 0
    is_causal: bool = True
    window: int | None = None
    tile_keys: int | None = 16
    """Number of keys and of queries per tile. None: chosen by the operator."""
    is_view: bool = True
    """True if queries are a view of a larger tensor, and keys and values are interleaved as in KvRows."""

    def __str__(self) -> str:
        return "-".join(str(getattr(self, name)).removeprefix("torch.") for name in LEVELS)

    def sees(self, query: int) -> list[int]:
        """Return the indices of the keys to which a query attends, by the definition."""
        position, window = self.first_query + query, math.inf if self.window is None else self.window
        keys = [(number, self.first_key + number) for number in range(self.num_keys)]
        return [number for number, at in keys if (at <= position or not self.is_causal) and at > position - window]


@dataclass
class Tensors:
    """A case's queries, keys and values."""

    q_TNH: Tensor
    k_SGH: Tensor
    v_SGH: Tensor


def check_prefill(case: PrefillCase, device: str, spoilt: str = "") -> None:
    """Assert that the kernel's results equal the definition's. `spoilt`: name of an argument in SPOILERS that is
    falsified for the kernel; then the assertion must fail."""
    tensors = made(case)
    told: dict[str, Any] = {
        "is_causal": not case.is_causal,
        "window": 3,
        "first_query": case.first_query - 1,
        "first_key": case.first_key - 1,
    }
    seen = replace(case, **{spoilt: told[spoilt]}) if spoilt else case
    check_results(case, attended(seen, tensors, device), by_definition(case, tensors))


SPOILERS = ("is_causal", "window", "first_query", "first_key")
"""Names of the arguments that can be falsified."""


def check_merging(device: str) -> None:
    """Assert that merging the attention to separate segments gives the attention to the whole sequence. Some queries
    attend to no key of some segments."""
    case = PrefillCase(num_queries=20, num_keys=60, first_query=40, window=13, is_view=True)
    tensors = made(case)
    parts = []
    for start, end in ((0, 25), (25, 41), (41, 60)):
        piece = Tensors(tensors.q_TNH, tensors.k_SGH[start:end], tensors.v_SGH[start:end])
        parts.append(attended(replace(case, first_key=start, num_keys=end - start), piece, device))
    o_TNH, lse_TN = merged(merged(parts[0], parts[1]), parts[2])
    check_results(case, (o_TNH, lse_TN), by_definition(case, tensors))


def check_attend(window: int | None, device: str) -> None:
    """Assert that attention over segments in any order equals attention over the whole sequence. With a window,
    `attend` uses masks."""
    case = PrefillCase(num_queries=20, num_keys=60, first_query=40, window=window, is_view=True)
    tensors = made(case)
    k_SGH, v_SGH = tensors.k_SGH.to(device), tensors.v_SGH.to(device)
    cuts = (41, 60), (0, 25), (25, 41)
    segments = [KvRows(k_SGH[start:end], v_SGH[start:end], start) for start, end in cuts]
    o_TNH = attend(tensors.q_TNH.to(device), case.first_query, segments, window, triton_kernel)
    expected_TNH, _ = by_definition(case, tensors)
    torch.testing.assert_close(o_TNH.cpu().double(), expected_TNH, atol=1e-5, rtol=1e-5)


def made(case: PrefillCase) -> Tensors:
    """Return random tensors of a case. Queries are large enough that attention is far from uniform."""
    random = torch.Generator().manual_seed(1)
    num_heads = case.num_kv_heads * case.group
    q_TNH = 2 * torch.randn(case.num_queries, num_heads + 3, case.head_dim, generator=random).to(case.dtype)
    kv_S2GH = torch.randn(case.num_keys, 2, case.num_kv_heads, case.head_dim, generator=random).to(case.dtype)
    unseen = set(range(case.num_keys)) - {key for query in range(case.num_queries) for key in case.sees(query)}
    kv_S2GH[sorted(unseen)] = math.nan
    views = q_TNH[:, 2 : num_heads + 2], kv_S2GH[:, 0], kv_S2GH[:, 1]
    return Tensors(*(each if case.is_view else each.contiguous() for each in views))


def attended(case: PrefillCase, tensors: Tensors, device: str) -> tuple[Tensor, Tensor]:
    """Return the kernel's results. If `is_causal` cannot express which keys are visible, a mask is passed."""
    q_TNH, k_SGH, v_SGH = (each.to(device) for each in (tensors.q_TNH, tensors.k_SGH, tensors.v_SGH))
    visibility = Visibility(case.is_causal)
    if case.window is not None or (case.is_causal and case.first_query != case.first_key):
        seen = [case.sees(query) for query in range(case.num_queries)]
        numbers = {key for keys in seen for key in keys}
        first, end = min(numbers, default=0), max(numbers, default=-1) + 1
        k_SGH, v_SGH = k_SGH[first:end], v_SGH[first:end]
        mask_TS = torch.zeros(case.num_queries, end - first, dtype=torch.bool)
        for query, keys in enumerate(seen):
            mask_TS[query, [key - first for key in keys]] = True
        visibility = Visibility(is_causal=False, mask_TS=mask_TS.to(device))
    tiles = None if case.tile_keys is None else PrefillTiles(case.tile_keys, case.tile_keys, num_warps=4)
    return prefill_attention(q_TNH, k_SGH, v_SGH, visibility, tiles=tiles)


def check_results(case: PrefillCase, found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Assert that attention and log-sum-exp are close to the definition's."""
    (o_TNH, lse_TN), (expected_TNH, expected_TN) = found, expected
    assert o_TNH.dtype == case.dtype and lse_TN.dtype == torch.float32
    tolerance = TOLERANCES[case.dtype]
    torch.testing.assert_close(o_TNH.cpu().double(), expected_TNH, atol=tolerance, rtol=tolerance)
    lse_TN = lse_TN.cpu().double()
    lse_TN = lse_TN.where(lse_TN > -1e29, -math.inf)
    torch.testing.assert_close(lse_TN, expected_TN, atol=1e-4, rtol=1e-5)


def by_definition(case: PrefillCase, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """Return the attention `[T, N, H]` and the log-sum-exp `[T, N]` in float64, computed for one query and one head at
    a time."""
    o_TNH = torch.zeros(tensors.q_TNH.shape, dtype=torch.float64)
    lse_TN = torch.full(tensors.q_TNH.shape[:2], -math.inf, dtype=torch.float64)
    k_SGH, v_SGH = tensors.k_SGH.double(), tensors.v_SGH.double()
    for query in range(case.num_queries):
        keys = case.sees(query)
        for head in range(tensors.q_TNH.shape[1]) if keys else ():
            kv_head = head // case.group
            scores_K = k_SGH[keys, kv_head] @ tensors.q_TNH[query, head].double() / math.sqrt(case.head_dim)
            lse_TN[query, head] = scores_K.logsumexp(0)
            o_TNH[query, head] = scores_K.softmax(0) @ v_SGH[keys, kv_head]
    return o_TNH, lse_TN
