"""Draws the next tokens of a batch with Triton, with temperature, filters and noise. Nothing is sorted.

A row of logits is divided into parts, one for each program. The launches are:

1. `find_largest` finds the largest logit.
2. `count_keys`, only with filters: five launches count tokens by the digits of their keys, to find the last token that
   top-k and top-p keep (`filter_kernels`). Rows without such a filter are skipped.
3. `draw_part` finds the token with the best score, the sum of scaled logit and noise, in each part.
4. `choose_best` chooses among the parts.

Each launch except the last reads the logits once. A batch therefore reads 8 bytes for each logit, or 28 bytes with
filters. The kernels are tested in Triton's interpreter and compiled for an H100, but they were not measured on a GPU.

Shape letters: B sequences, V vocabulary size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.modeling.kernels.triton.launch import check, launch, require_triton
from baton.modeling.kernels.triton.tiles import alike

MOST_TOKENS = 1 << 19
"""Maximum size of a vocabulary."""
_TILE_TOKENS = 2048
_NUM_WARPS = 16
_MOST_PARTS = 64
_NUM_PROGRAMS = 1024
"""Approximate number of programs of a launch. It is enough for about eight programs on each multiprocessor of an H100.
With more parts, the programs would read more histograms than logits."""
_DTYPES = (torch.int64, torch.int64, torch.float64, torch.float64, torch.float32)


def draw_tokens(logits_BV: Tensor, draws: Sequence[Tensor], *, filters: bool) -> Tensor:
    """Draw the next token of each row of logits (fp32), `[B]`, int64. Does not wait for the device.

    `draws`: the five tensors of `baton.modeling.forward.drawing.Draws`, on the device of the logits. `filters`: True if
    a row has filters. The result of a greedy row is the first token with the largest logit. The result of a row with
    NaN or plus infinity is -1, and that of a row whose logits are all minus infinity is 0.

    The token of a row does not depend on the other rows, and is that of `drawing.draw_row`, with two exceptions, which
    are due to the rounding of float64: the logarithms of noise may be rounded differently, and the mass of a prefix of
    tokens may differ from that of `draw_row` by the error of a float64 sum (`filter_kernels`). If top_p times the total
    mass is closer than that to the mass of a prefix, one token more or fewer may be kept.

    Raises RuntimeError for tensors that do not fit together, and ConfigError if Triton is not installed.
    """
    require_triton()
    from baton.modeling.kernels.triton.sampler import draw_kernels, filter_kernels
    from baton.modeling.kernels.triton.sampler.logit_tiles import DrawnRows, PartResults, SamplerShape

    check(logits_BV.dim() == 2 and logits_BV.dtype == torch.float32, "logits must be [B, V], float32")
    num_rows, vocab_size = logits_BV.shape
    check(0 < vocab_size <= MOST_TOKENS, f"{vocab_size} tokens: the sampler takes 1 to {MOST_TOKENS}")
    for column_B, dtype in zip(draws, _DTYPES, strict=True):
        fits = column_B.shape == (num_rows,) and column_B.dtype == dtype and column_B.is_contiguous()
        check(fits and column_B.device == logits_BV.device, f"drawing parameters must be [{num_rows}], {_DTYPES}")
    tokens_B = logits_BV.new_empty(num_rows, dtype=torch.int64)
    if not num_rows:
        return tokens_B
    logits_BV = logits_BV.contiguous()
    if logits_BV.data_ptr() != alike(logits_BV.data_ptr()):
        logits_BV = logits_BV.clone()  # Triton would compile another kernel for this address
    num_parts, size = _num_parts(num_rows, vocab_size), (num_rows, _MOST_PARTS)
    dtypes = torch.float32, torch.int32, torch.float64, torch.int32
    parts = PartResults(*(logits_BV.new_empty(size, dtype=dtype) for dtype in dtypes))
    rows, shape = DrawnRows(logits_BV, *draws), SamplerShape(vocab_size, _TILE_TOKENS, _MOST_PARTS)
    searches = filter_kernels.Searches(None, None)
    if filters:
        histograms_B2D = logits_BV.new_zeros((num_rows, 2, filter_kernels.NUM_BINS.value), dtype=torch.int64)
        states_BDS = parts.best.new_empty((num_rows, len(shape.digits), 3))
        searches = filter_kernels.Searches(histograms_B2D, states_BDS)
    device, grid, options = logits_BV.device, (num_rows, num_parts), {"num_warps": _NUM_WARPS}
    launch(device, draw_kernels.find_largest, grid, rows, parts, shape, **options)
    for digit in shape.digits if filters else ():
        launch(device, filter_kernels.count_keys, grid, rows, parts, searches, digit, shape, **options)
    launch(device, draw_kernels.draw_part, grid, rows, parts, searches, filters, shape, **options)
    launch(device, draw_kernels.choose_best, (num_rows,), rows, parts, tokens_B, num_parts, shape, num_warps=1)
    return tokens_B


def _num_parts(num_rows: int, vocab_size: int) -> int:
    """Return the number of parts into which each row is divided. It does not affect results."""
    num_tiles = -(-vocab_size // _TILE_TOKENS)
    most = min(max(_NUM_PROGRAMS // num_rows, 1), _MOST_PARTS, num_tiles)
    return -(-num_tiles // -(-num_tiles // most))
