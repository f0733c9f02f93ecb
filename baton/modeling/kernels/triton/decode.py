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
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from baton.modeling.kernels.triton.heads import Heads
from baton.modeling.kernels.triton.launch import check, on, require_triton, widens
from baton.modeling.kernels.triton.row_kernels import StepRows
from baton.modeling.kernels.triton.tiles import DecodeTiles, decode_tiles, padded

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


def most_listed(rows: StepRows, seen: SeenKeys = ALL_KEYS) -> int:
    """Return an upper bound on the number of keys to which a kv head of a sequence attends. The bound depends only on
    values that the host knows."""
    if seen.picks is not None:
        return seen.picks[0].shape[2]
    if seen.window is not None:
        return min(rows.most_keys, seen.window + rows.most_queries - 1)
    return rows.most_keys


def decode_attention(
    q_TNH: Tensor,
    pages_PS2GH: Tensor,
    rows: StepRows,
    seen: SeenKeys = ALL_KEYS,
    *,
    tiles: DecodeTiles | None = None,
) -> Tensor:
    """Return the attention output `[T, N, H]` of the sequences' new tokens, in the dtype of the queries. Does not wait
    for the device.

    Scores are scaled by 1 / sqrt(H). Softmax and sums are computed in fp32. The result is zero for a token that attends
    to no key. For tokens that belong to no sequence, nothing is written.

    `tiles`: block sizes for tests and benchmarks. None: the block sizes of `baton.modeling.kernels.triton.tiles`.
    Raises RuntimeError for tensors that do not fit together, and ConfigError if Triton is not installed.
    """
    require_triton()
    from baton.modeling.kernels.triton import decode_kernels as kernels

    _check(q_TNH, pages_PS2GH, rows, seen)
    num_tokens, num_heads, head_dim = q_TNH.shape
    o_TNH = q_TNH.new_empty(q_TNH.shape)
    if not num_tokens or not rows.num_rows:
        return o_TNH
    num_pairs = rows.most_queries * num_heads // pages_PS2GH.shape[3]
    most_keys = most_listed(rows, seen)
    tiles = tiles or decode_tiles(head_dim, q_TNH.dtype, num_pairs, most_keys)
    check(tiles.num_splits * tiles.split_keys >= most_keys, f"splits must cover {most_keys} keys")
    part_o_TNXH = q_TNH.new_empty((num_tokens, num_heads, tiles.num_splits, head_dim), dtype=torch.float32)
    part_lse_TNX = part_o_TNXH.new_empty(part_o_TNXH.shape[:3])
    q = Heads(q_TNH, q_TNH.stride(0), q_TNH.stride(1))
    pages = kernels.Pages(pages_PS2GH, pages_PS2GH.stride(0))
    picks_BGK, num_picks_BG = seen.picks or (None, None)
    where = kernels.Rows(
        table=rows.table_BC,
        table_stride=rows.table_BC.stride(0),
        lengths=rows.lengths_B,
        starts=rows.starts_E,
        picks=picks_BGK,
        num_picks=num_picks_BG,
        most_picks=0 if picks_BGK is None else picks_BGK.shape[2],
        unseen=seen.unseen_B2,
    )
    results = kernels.Results(o_TNH, part_o_TNXH, part_lse_TNX)
    shape = _shape(q_TNH, pages_PS2GH, rows, seen, tiles)
    with on(q_TNH.device, kernels.attend_split):
        grid: tuple[int, ...] = (rows.num_rows * shape.num_tiles, shape.num_kv_heads, tiles.num_splits)
        options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
        kernels.attend_split[grid](q, pages, where, results, shape, **options)
        if shape.is_split:
            grid = (rows.num_rows * rows.most_queries, num_heads)
            kernels.merge_splits[grid](where, results, tiles.num_splits, shape, num_warps=1)
    return o_TNH


def _shape(q_TNH: Tensor, pages_PS2GH: Tensor, rows: StepRows, seen: SeenKeys, tiles: DecodeTiles) -> "DecodeShape":
    from baton.modeling.kernels.triton import decode_kernels as kernels

    page_tokens, _, num_kv_heads, head_dim = pages_PS2GH.shape[1:]
    group = q_TNH.shape[1] // num_kv_heads
    return kernels.DecodeShape(
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        head_pad=padded(head_dim),
        page_tokens=page_tokens,
        window=seen.window or 0,
        has_picks=seen.picks is not None,
        has_unseen=seen.unseen_B2 is not None,
        most_queries=rows.most_queries,
        num_tiles=-(-rows.most_queries * group // tiles.rows),
        tile_rows=tiles.rows,
        tile_keys=tiles.keys,
        split_keys=tiles.split_keys,
        is_split=tiles.num_splits > 1,
        in_one_page=seen.lists_all and page_tokens % tiles.keys == 0,
        scale=math.log2(math.e) / math.sqrt(head_dim),
        widen=widens(kernels.attend_split, q_TNH.dtype),
    )


def _check(q_TNH: Tensor, pages_PS2GH: Tensor, rows: StepRows, seen: SeenKeys) -> None:
    rows.check_pages(pages_PS2GH)
    rows.check_tokens(q_TNH, pages_PS2GH)
    num_heads, num_kv_heads = q_TNH.shape[1], pages_PS2GH.shape[3]
    check(num_heads > 0 and num_heads % num_kv_heads == 0, f"{num_heads} heads do not share {num_kv_heads} kv heads")
    seen.check(rows.num_rows, num_kv_heads, q_TNH.device)
