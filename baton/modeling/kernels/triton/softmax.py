"""Online softmax, as Triton functions that the attention kernels call. Imports Triton.

Scores are multiplied by log2(e), so that weights are powers of two.

Shape letters: M rows of a tile (pairs of a query and a head), S keys, H head dim, padded to a power of two.
"""

import triton
import triton.language as tl

NOTHING = tl.constexpr(-1e30)
"""Largest score and log-sum-exp of an empty set of keys. It is finite, because the difference of two infinities would
be NaN."""
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def product(a_MX: tl.tensor, b_XY: tl.tensor, widen: tl.constexpr) -> tl.tensor:
    """Multiply two matrices with fp32 accumulation. fp32 operands are not rounded to TF32. If `widen` is set, operands
    are converted to fp32 first."""
    if widen:
        a_MX = a_MX.to(tl.float32)
        b_XY = b_XY.to(tl.float32)
    return tl.dot(a_MX, b_XY, input_precision="ieee")


@triton.jit
def begun(num_rows: tl.constexpr, head_pad: tl.constexpr) -> tl.tuple:
    """Return the initial state of the online softmax, before any key: largest scores, totals of weights, and weighted
    sums."""
    largest_M = tl.full([num_rows], NOTHING, tl.float32)
    total_M = tl.full([num_rows], 0.0, tl.float32)
    return largest_M, total_M, tl.full([num_rows, head_pad], 0.0, tl.float32)


@triton.jit
def weighed(score_MS: tl.tensor, largest_M: tl.tensor, total_M: tl.tensor) -> tl.tuple:
    """Add a tile of keys to the online softmax. Return the weights of the tile, the factors for rescaling earlier sums,
    the new largest scores, and the new totals of weights. A score of minus infinity marks a key to which a row does not
    attend."""
    new_M = tl.maximum(largest_M, tl.max(score_MS, 1))
    weight_MS = tl.exp2(score_MS - new_M[:, None])
    shrink_M = tl.exp2(largest_M - new_M)
    return weight_MS, shrink_M, new_M, total_M * shrink_M + tl.sum(weight_MS, 1)


@triton.jit
def ended(largest_M: tl.tensor, total_M: tl.tensor, sum_MH: tl.tensor) -> tl.tuple:
    """Finish the online softmax. Return the attention output, and the log-sum-exp to base 2. For a row that attended to
    no key, the output is zero and the log-sum-exp is NOTHING."""
    safe_M = tl.where(total_M == 0.0, 1.0, total_M)
    return sum_MH / safe_M[:, None], largest_M + tl.log2(safe_M)
