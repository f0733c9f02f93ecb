"""Decode attention with Triton, over KV in pages. It serves a ragged batch of sequences with few new tokens each, in
one or two launches.

Every new token attends to the keys of its sequence up to its own key. The first launch divides the keys of each
sequence into splits of equal length. If there may be several splits, a second launch merges their results. The number
of splits depends only on the upper bound on keys. The same launches can therefore be captured in a CUDA graph,
regardless of the lengths of the sequences.

Shape letters: B sequences, T tokens, N heads, G kv heads, H head dim, P pages, S tokens of a page, at most K selected
keys, X splits.
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from baton.modeling.kernels.triton.heads import Heads, Inputs, Pages
from baton.modeling.kernels.triton.launch import check, launch, require_triton, widens
from baton.modeling.kernels.triton.row_kernels import StepRows
from baton.modeling.kernels.triton.tiles import MOST_QUERIES, DecodeTiles, decode_tiles, padded

if TYPE_CHECKING:
    from baton.modeling.kernels.triton.decode_kernels import DecodeShape


@dataclass(frozen=True)
class SeenKeys:
    """Restriction of the keys to which the new tokens of a step attend. In any case, a new token attends only to keys
    up to its own key. Keys are numbered from 0 within their sequence. Tensors are int32, contiguous, and on the device
    of `StepRows`. The host does not check their contents."""

    window: int | None = None
    """Sliding window: number of latest keys to which a new token attends, including its own key. None: all keys."""
    picks: tuple[Tensor, Tensor] | None = None
    """Selected keys: `keys_BGK`, a list of keys for each sequence and kv head, and `num_BG`, the length of each list.
    Only the selected keys are read. Entries that are not keys of the sequence are ignored. None: all keys."""
    unseen_B2: Tensor | None = None
    """Range of keys to which each sequence does not attend: index of the first key, and end (exclusive). None: no keys
    are excluded."""

    @property
    def lists_all(self) -> bool:
        """Return True if all sequences attend to all of their keys."""
        return self.window is None and self.picks is None and self.unseen_B2 is None

    def check(self, num_rows: int, num_kv_heads: int, device: torch.device) -> None:
        """Raise RuntimeError unless the tensors have the shapes and dtypes for `num_rows` sequences and `num_kv_heads`
        kv heads, and are on `device`."""
        check(self.window is None or self.window > 0, f"window = {self.window}: use 1 or more, or None")
        tensors = [] if self.picks is None else list(self.picks)
        if self.picks is not None:
            shapes = [tuple(each.shape) for each in tensors]
            fits = len(shapes[0]) == 3 and shapes[0][:2] == shapes[1] == (num_rows, num_kv_heads) and shapes[0][2] > 0
            check(fits, f"picks must be [{num_rows}, {num_kv_heads}, K], their numbers too: not {shapes}")
        if self.unseen_B2 is not None:
            tensors.append(self.unseen_B2)
            check(self.unseen_B2.shape == (num_rows, 2), f"keys that rows leave out must be [{num_rows}, 2]")
        for each in tensors:
            check(each.dtype == torch.int32 and each.is_contiguous(), "picks and unseen must be int32, contiguous")
            check(each.device == device, "picks and unseen must be on the device of the rows")


ALL_KEYS = SeenKeys()
"""Default SeenKeys: every new token attends to all keys up to its own."""


def most_listed(most_keys: int, most_queries: int, seen: SeenKeys = ALL_KEYS) -> int:
    """Return an upper bound on the number of keys to which a kv head of a sequence attends. The sequence has at most
    `most_keys` keys and `most_queries` new tokens."""
    if seen.picks is not None:
        return seen.picks[0].shape[2]
    if seen.window is not None:
        return min(most_keys, seen.window + most_queries - 1)
    return most_keys


def decode_attention(
    q_TNH: Tensor,
    pages_PS2GH: Tensor,
    rows: StepRows,
    seen: SeenKeys = ALL_KEYS,
    *,
    o_TNH: Tensor | None = None,
    tiles: DecodeTiles | None = None,
) -> Tensor:
    """Return the attention output `[T, N, H]` of the sequences' new tokens, in the dtype of the queries. Does not wait
    for the device.

    Scores are scaled by 1 / sqrt(H). Softmax and sums are computed in fp32. The result is zero for a token that attends
    to no key. For tokens that belong to no sequence, nothing is written.

    `o_TNH`: contiguous memory for the output. None: new memory. `tiles`: block sizes for tests and benchmarks. None:
    the block sizes of `baton.modeling.kernels.triton.tiles`. Raises RuntimeError for tensors that do not fit together,
    and ConfigError if Triton is not installed.
    """
    require_triton()
    from baton.modeling.kernels.triton import decode_kernels as kernels

    rows.check(q_TNH, pages_PS2GH)
    seen.check(rows.num_rows, pages_PS2GH.shape[3], q_TNH.device)
    num_heads, head_dim = q_TNH.shape[1:]
    o_TNH = output_for(q_TNH, o_TNH)
    if not len(q_TNH) or not rows.num_rows:
        return o_TNH
    group, most_now = num_heads // pages_PS2GH.shape[3], most_listed(rows.most_keys, rows.most_queries, seen)
    most_keys = max(most_now, most_listed(rows.capacity, MOST_QUERIES, replace(seen, picks=None)))
    tiles = tiles or decode_tiles(head_dim, q_TNH.dtype, group, most_keys)
    num_splits = -(-most_now // tiles.split_keys)
    num_tokens = min(rows.num_tokens or rows.num_rows * rows.most_queries, len(q_TNH))
    part_o_TNXH = q_TNH.new_empty((num_tokens, num_heads, num_splits, head_dim), dtype=torch.float32)
    part_lse_TNX = part_o_TNXH.new_empty(part_o_TNXH.shape[:3])
    inputs = Inputs(Heads(q_TNH, q_TNH.stride(0), q_TNH.stride(1)), Pages(pages_PS2GH, pages_PS2GH.stride(0)))
    picks_BGK, num_picks_BG = seen.picks or (None, None)
    where = kernels.Rows(
        table=rows.table_BC,
        table_stride=rows.table_BC.stride(0),
        lengths=rows.lengths_B,
        starts=rows.starts_E,
        firsts=rows.starts_E if rows.firsts_B is None else rows.firsts_B,
        picks=picks_BGK,
        num_picks=num_picks_BG,
        unseen=seen.unseen_B2,
    )
    most_picks = 0 if picks_BGK is None else picks_BGK.shape[2]
    results = kernels.Results(o_TNH, part_o_TNXH, part_lse_TNX)
    shape = _shape(q_TNH, pages_PS2GH, seen, tiles, is_split=most_keys > tiles.split_keys)
    num_tiles, options = -(-rows.most_queries * group // tiles.rows), {"num_warps": tiles.num_warps}
    grid = (rows.num_rows, shape.num_kv_heads * num_tiles, num_splits)
    options["num_stages"] = tiles.num_stages
    launch(q_TNH.device, kernels.attend_split, grid, inputs, where, results, most_picks, shape, **options)
    if shape.is_split:
        grid, sizes = (rows.num_rows, num_heads, rows.most_queries), (most_picks, num_splits)
        launch(q_TNH.device, kernels.merge_splits, grid, where, results, *sizes, shape, num_warps=1)
    return o_TNH


def output_for(q_TNH: Tensor, o_TNH: Tensor | None) -> Tensor:
    """Return `o_TNH`, memory for the attention output of the queries. None: allocate it. Raises RuntimeError if it does
    not fit the queries."""
    if o_TNH is None:
        return q_TNH.new_empty(q_TNH.shape)
    fits = o_TNH.shape == q_TNH.shape and o_TNH.dtype == q_TNH.dtype and o_TNH.device == q_TNH.device
    check(fits and o_TNH.is_contiguous(), f"the output must be {list(q_TNH.shape)}, contiguous, like the queries")
    return o_TNH


def _shape(q_TNH: Tensor, pages_PS2GH: Tensor, seen: SeenKeys, tiles: DecodeTiles, *, is_split: bool) -> "DecodeShape":
    from baton.modeling.kernels.triton import decode_kernels as kernels

    page_tokens, _, num_kv_heads, head_dim = pages_PS2GH.shape[1:]
    return kernels.DecodeShape(
        num_kv_heads=num_kv_heads,
        group=q_TNH.shape[1] // num_kv_heads,
        head_dim=head_dim,
        head_pad=padded(head_dim),
        page_tokens=page_tokens,
        window=seen.window or 0,
        has_picks=seen.picks is not None,
        has_unseen=seen.unseen_B2 is not None,
        tile_rows=tiles.rows,
        tile_keys=tiles.keys,
        split_keys=tiles.split_keys,
        is_split=is_split,
        in_one_page=seen.lists_all and page_tokens % tiles.keys == 0,
        scale=math.log2(math.e) / math.sqrt(head_dim),
        widen=widens(kernels.attend_split, q_TNH.dtype),
    )
