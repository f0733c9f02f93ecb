"""Prefill attention with Triton, over KV in pages. It serves all sequences of a step that have many new tokens, in one
launch.

The new tokens of a sequence attend to the keys of the sequence up to their own keys. Keys are read through the block
table, so the order of pages does not matter. The result of a sequence depends neither on the other sequences of the
step nor on its pages, bit for bit.

Shape letters: B sequences, T tokens, N heads, G kv heads, H head dim, P pages, S tokens of a page, X blocks of queries.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.modeling.kernels.triton.decode import output_for
from baton.modeling.kernels.triton.heads import Heads, Inputs, Pages
from baton.modeling.kernels.triton.launch import check, launch, require_triton, shared_bytes_of, widens
from baton.modeling.kernels.triton.row_kernels import StepRows
from baton.modeling.kernels.triton.tiles import PrefillTiles, padded, span_tiles


@dataclass(frozen=True)
class SpanRows:
    """Sequences of a step that have many new tokens, and the division of their queries into blocks. One program
    computes the attention of one block in one kv head."""

    rows: StepRows
    blocks_X2: Tensor
    """Blocks of queries, as pairs of a sequence's index in `rows`, and the index of the block's first pair of a query
    and a head that share the kv head, int32. A block contains `tiles.rows` pairs, or fewer at the end of the
    sequence."""
    tiles: PrefillTiles
    """Block sizes with which `blocks_X2` was made."""


def tiles_for(head_dim: int, dtype: torch.dtype, device: torch.device) -> PrefillTiles:
    """Return the block sizes of `span_attention` on a device, for heads of `head_dim` elements."""
    return span_tiles(head_dim, dtype, shared_bytes_of(device))


def divide(num_new: Sequence[int], num_keys: Sequence[int], group: int, tile_rows: int) -> npt.NDArray[np.int32]:
    """Return the blocks of queries of some sequences, `[X, 2]`, as described in `SpanRows`. `num_new`: number of new
    tokens of each sequence. `num_keys`: number of keys of each sequence, including those of new tokens. `group`: number
    of query heads that share a kv head. Blocks with the most keys come first, so that no long block starts last."""
    num_blocks = [-(-new * group // tile_rows) for new in num_new]
    row_X = np.repeat(np.arange(len(num_new)), num_blocks)
    first_X = np.concatenate([np.arange(0, new * group, tile_rows) for new in num_new])
    last_key_X = np.subtract(num_keys, num_new)[row_X] + first_X // group
    return np.stack((row_X, first_X), 1)[np.argsort(-last_key_X, kind="stable")].astype(np.int32)


def span_attention(
    q_TNH: Tensor, pages_PS2GH: Tensor, spans: SpanRows, *, window: int | None = None, o_TNH: Tensor | None = None
) -> Tensor:
    """Return the attention output `[T, N, H]` of the sequences' new tokens, in the dtype of the queries. Does not wait
    for the device.

    Scores are scaled by 1 / sqrt(H). Softmax and sums are computed in fp32. For tokens of other sequences, nothing is
    written. `window`: sliding window, the number of latest keys to which a new token attends, including its own key.
    `o_TNH`: contiguous memory for the output. None: new memory. Raises RuntimeError for tensors that do not fit
    together, and ConfigError if Triton is not installed.
    """
    require_triton()
    from baton.modeling.kernels.triton import span_kernel as kernels

    rows, tiles = spans.rows, spans.tiles
    rows.check(q_TNH, pages_PS2GH)
    check(window is None or window > 0, f"window = {window}: use 1 or more, or None")
    is_pair = spans.blocks_X2.shape == (len(spans.blocks_X2), 2) and spans.blocks_X2.is_contiguous()
    check(is_pair and spans.blocks_X2.dtype == torch.int32, "blocks must be [X, 2], int32, contiguous")
    page_tokens, _, num_kv_heads, head_dim = pages_PS2GH.shape[1:]
    o_TNH = output_for(q_TNH, o_TNH)
    if not len(spans.blocks_X2):
        return o_TNH
    shape = kernels.SpanShape(
        num_kv_heads=num_kv_heads,
        group=q_TNH.shape[1] // num_kv_heads,
        head_dim=head_dim,
        head_pad=padded(head_dim),
        page_tokens=page_tokens,
        window=window or 0,
        tile_rows=tiles.rows,
        tile_keys=tiles.keys,
        in_one_page=page_tokens % tiles.keys == 0,
        scale=math.log2(math.e) / math.sqrt(head_dim),
        widen=widens(kernels.attend_span, q_TNH.dtype),
    )
    inputs = Inputs(Heads(q_TNH, q_TNH.stride(0), q_TNH.stride(1)), Pages(pages_PS2GH, pages_PS2GH.stride(0)))
    firsts = rows.starts_E if rows.firsts_B is None else rows.firsts_B
    table = rows.table_BC, rows.table_BC.stride(0)
    where = kernels.Spans(spans.blocks_X2, *table, rows.lengths_B, rows.starts_E, firsts)
    grid, options = (len(spans.blocks_X2), num_kv_heads), {"num_warps": tiles.num_warps}
    launch(q_TNH.device, kernels.attend_span, grid, inputs, where, o_TNH, shape, num_stages=tiles.num_stages, **options)
    return o_TNH
