"""Prefill attention with Triton, of consecutive queries to one segment of keys. `baton.modeling.forward.attention`
merges the results of several segments by their log-sum-exps.

Shape letters: T queries, S keys, N heads, G kv heads, H head dim.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.modeling.kernels.triton.heads import Heads
from baton.modeling.kernels.triton.launch import DTYPES, check, launch, require_triton, shared_bytes_of, widens
from baton.modeling.kernels.triton.tiles import PrefillTiles, padded, prefill_tiles


@dataclass(frozen=True)
class Visibility:
    """Keys of a segment to which each query attends."""

    is_causal: bool = True
    """True if query t attends only to keys 0 to t of the segment."""
    mask_TS: Tensor | None = None
    """Optional bool mask [T, S], applied in addition to the causal mask. None: no extra mask."""


DENSE = Visibility(is_causal=False)
"""Visibility without masks: every query attends to every key."""
QUERIES = (16, 32, 64, 128)
"""Numbers of queries for which a kernel is compiled. Other numbers use the kernel of the next larger entry, or of the
last entry if there is no larger one."""


def prefill_attention(
    q_TNH: Tensor, k_SGH: Tensor, v_SGH: Tensor, seen: Visibility = DENSE, *, tiles: PrefillTiles | None = None
) -> tuple[Tensor, Tensor]:
    """Return the attention output `[T, N, H]` over the keys of the segment, in the dtype of the queries, and the
    natural log-sum-exp `[T, N]` of the scores in fp32. Does not wait for the device.

    Queries, keys and values may be strided views, such as those of `KvRows`, but each head must be contiguous. Scores
    are scaled by 1 / sqrt(H). Softmax and sums are computed in fp32. For a query that attends to no key, the output is
    zero, and the log-sum-exp is finite and below -1e29, so that results can be merged.

    `tiles`: block sizes for tests and benchmarks. None: the block sizes of `baton.modeling.kernels.triton.tiles`.
    Raises RuntimeError for tensors that do not fit together, and ConfigError if Triton is not installed.
    """
    require_triton()
    from baton.modeling.kernels.triton import prefill_kernel as kernels

    _check(q_TNH, k_SGH, v_SGH, seen)
    num_queries, num_heads, head_dim = q_TNH.shape
    o_TNH = q_TNH.new_empty(q_TNH.shape)
    lse_TN = q_TNH.new_empty((num_queries, num_heads), dtype=torch.float32)
    if not num_queries:
        return o_TNH, lse_TN
    if tiles is None:
        shared_bytes = None if seen.mask_TS is not None else shared_bytes_of(q_TNH.device)
        tiles = prefill_tiles(head_dim, q_TNH.dtype, num_queries, shared_bytes)
    q, k, v = (Heads(each, each.stride(0), each.stride(1)) for each in (q_TNH, k_SGH, v_SGH))
    shape = kernels.PrefillShape(
        group=num_heads // k_SGH.shape[1],
        head_dim=head_dim,
        head_pad=padded(head_dim),
        is_causal=seen.is_causal,
        has_mask=seen.mask_TS is not None,
        tile_rows=tiles.rows,
        tile_keys=tiles.keys,
        scale=math.log2(math.e) / math.sqrt(head_dim),
        widen=widens(kernels.attend_block, q_TNH.dtype),
    )
    mask_TS = None if seen.mask_TS is None else seen.mask_TS.view(torch.uint8)
    segment = kernels.Segment(q, k, v, o_TNH, lse_TN, mask_TS)
    sizes = num_queries, len(k_SGH), 0 if mask_TS is None else mask_TS.stride(0)
    grid, options = (-(-num_queries // tiles.rows), num_heads), {"num_warps": tiles.num_warps}
    launch(q_TNH.device, kernels.attend_block, grid, segment, *sizes, shape, num_stages=tiles.num_stages, **options)
    return o_TNH, lse_TN


def compile_prefills(
    heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device, *, with_masks: bool
) -> None:
    """Compile all prefill kernels of a model. `heads`: number of heads, number of kv heads, and head dim. `with_masks`:
    also compile the kernels with masks, which sliding windows need.

    Takes about a second per kernel, the first time on a machine. Without this call, the first prompt that needs a
    kernel waits for its compilation, and so do all streams of the batch.
    """
    num_heads, num_kv_heads, head_dim = heads
    for num_queries in QUERIES:
        q_TNH = torch.zeros(num_queries, num_heads, head_dim, dtype=dtype, device=device)
        kv_S2GH = torch.zeros(num_queries, 2, num_kv_heads, head_dim, dtype=dtype, device=device)
        masks = [None, torch.ones(num_queries, num_queries, dtype=torch.bool, device=device)]
        for is_causal in (True, False):
            for mask_TS in masks[: 1 + with_masks]:
                seen = Visibility(is_causal=is_causal, mask_TS=mask_TS)
                prefill_attention(q_TNH, kv_S2GH[:, 0], kv_S2GH[:, 1], seen)


def _check(q_TNH: Tensor, k_SGH: Tensor, v_SGH: Tensor, seen: Visibility) -> None:
    tensors = q_TNH, k_SGH, v_SGH
    check(all(each.dim() == 3 for each in tensors), "queries, keys and values must be [tokens, heads, head dim]")
    check(k_SGH.shape == v_SGH.shape, f"keys {list(k_SGH.shape)} and values {list(v_SGH.shape)} must have one shape")
    check(k_SGH.shape[2] == q_TNH.shape[2], f"head dim is {q_TNH.shape[2]}, that of keys {k_SGH.shape[2]}")
    num_heads, num_kv_heads = q_TNH.shape[1], k_SGH.shape[1]
    shares = num_kv_heads > 0 and num_heads > 0 and num_heads % num_kv_heads == 0
    check(shares, f"{num_heads} heads do not share {num_kv_heads} kv heads")
    check(all(each.stride(2) == 1 for each in tensors), "each head must be contiguous")
    check(
        len({each.dtype for each in tensors}) == 1 and q_TNH.dtype in DTYPES, "use bfloat16, float16 or float32 for all"
    )
    check(len({each.device for each in tensors}) == 1, "queries, keys and values must be on one device")
    if seen.mask_TS is not None:
        shape = len(q_TNH), len(k_SGH)
        check(seen.mask_TS.shape == shape and seen.mask_TS.dtype == torch.bool, f"a mask must be {list(shape)}, bool")
        check(seen.mask_TS.stride(1) == 1 or shape[1] == 1, "a row of the mask must be contiguous")
        check(seen.mask_TS.device == q_TNH.device, "the mask must be on the device of the queries")
