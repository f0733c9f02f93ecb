"""Triton kernels that find the largest logits, add noise, and choose the next tokens. Imports Triton.

Shape letters: B sequences, V vocabulary size, X tokens of a tile, P parts of a row of logits.
"""

import triton
import triton.language as tl

from baton.modeling.kernels.triton.sampler.filter_kernels import ALL_EQUAL, Searches, last_kept
from baton.modeling.kernels.triton.sampler.logit_tiles import (
    DrawnRows,
    PartResults,
    largest_logit,
    load_tile,
    part_of,
    scale,
)

NO_TOKEN = tl.constexpr(-1)
"""Result for a row of logits that contains NaN or plus infinity."""
STEP = tl.constexpr(0x9E3779B97F4A7C15)
FACTOR = tl.constexpr(0xBF58476D1CE4E5B9)
LAST_FACTOR = tl.constexpr(0x94D049BB133111EB)
"""Constants of the finaliser of SplitMix64, which `baton.modeling.forward.drawing` also uses."""
HALF = tl.constexpr(1 << 51)
"""Half of the number of different values of a noise hash."""
HASH_UNIT = tl.constexpr(2.0**-52)
SLACK = tl.constexpr(2.0**-15)
"""Difference of two fp32 scores above which the larger one is also larger in float64. Tokens within this difference of
the best fp32 score are compared in float64.

It must be at least twice the error of a score that may be the best, that is, a score between -3.7 and 36.8. The score
is s + g with the noise g = -log(e) and e = -log(u). The scaled logit s is the same number in fp32 and float64. An fp32
logarithm has a relative error of at most 4 units in the last place, 2^-22. e is computed with a relative error below
2^-22 + 2^-21 (`noise`), which changes g by the same absolute amount: 0.8e-6. The second logarithm adds at most 37 *
2^-22 = 8.8e-6, and the rounding of s + g at most 37 * 2^-24 = 2.2e-6. The sum is 1.2e-5, and twice the sum is below
2^-15 = 3.0e-5."""


@triton.jit
def find_largest(rows: DrawnRows, parts: PartResults, shape: tl.constexpr) -> None:
    """Kernel that finds the first token with the largest logit in one part of a row. Grid: (B, P)."""
    row, begin, end = part_of(shape)
    best_X = tl.full([shape.tile_tokens], float("-inf"), tl.float32)
    best_id_X = begin + tl.arange(0, shape.tile_tokens)
    for start in range(begin, end, shape.tile_tokens):
        id_X, logit_X = load_tile(rows, row, start, shape)
        logit_X = tl.where(logit_X == logit_X, logit_X, float("inf"))
        is_better_X = logit_X > best_X
        best_X, best_id_X = tl.where(is_better_X, logit_X, best_X), tl.where(is_better_X, id_X, best_id_X)
    best = tl.max(best_X, 0)
    at = row * shape.most_parts + tl.program_id(1)
    tl.store(parts.largest + at, best)
    tl.store(parts.largest_id + at, tl.min(tl.where(best_X == best, best_id_X, shape.vocab_size), 0))


@triton.jit
def hash_tokens(key: tl.tensor, id_X: tl.tensor) -> tl.tensor:
    """Return 52 hash bits of each token id."""
    bits_X = (id_X + 1).to(tl.uint64) * STEP + key
    bits_X = (bits_X ^ (bits_X >> 30)) * FACTOR
    bits_X = (bits_X ^ (bits_X >> 27)) * LAST_FACTOR
    return (bits_X ^ (bits_X >> 31)) >> 12


@triton.jit
def noise(hash_X: tl.tensor) -> tl.tensor:
    """Return -log(e) with e = -log(u) and u = (hash + 1/2) / 2^52, in fp32. The relative error of e is small for all u.

    For u >= 1/2, let w = 1 - u, which is computed from the hash without rounding the difference, and y the fp32 number
    next to 1 - w. Then e = -log(1 - w) = -log(y) w / (1 - y), because the ratio of log(1 - w) to w changes slowly
    (Goldberg, 1991, theorem 4). It has the relative errors of w, of the logarithm and of two divisions and products."""
    is_low_X = hash_X < HALF
    part_X = (tl.where(is_low_X, hash_X, 2 * HALF - 1 - hash_X).to(tl.float32) + 0.5) * HASH_UNIT
    y_X = tl.where(is_low_X, part_X, 1.0 - part_X)
    gap_X = 1.0 - y_X
    ratio_X = tl.where(is_low_X, 1.0, part_X / tl.where(gap_X > 0, gap_X, 1.0))
    e_X = tl.where(gap_X > 0, -tl.log(y_X) * ratio_X, part_X)
    return -tl.log(e_X)


@triton.jit
def exact_score(key: tl.tensor, token_id: tl.tensor, scaled: tl.tensor) -> tl.tensor:
    """Return the score of one token in float64."""
    uniform = (hash_tokens(key, token_id).to(tl.float64) + 0.5) * HASH_UNIT
    return -tl.log(-tl.log(uniform)) + scaled.to(tl.float64)


@triton.jit
def draw_part(
    rows: DrawnRows, parts: PartResults, searches: Searches, filters: tl.constexpr, shape: tl.constexpr
) -> None:
    """Kernel that finds the token with the best score among the kept tokens of one part of a row. Grid: (B, P)."""
    row, begin, end = part_of(shape)
    temperature = tl.load(rows.temperature + row)
    largest = largest_logit(parts, row, tl.num_programs(1), shape)
    if (temperature == 0) | (tl.abs(largest) == float("inf")):
        return
    noise_key = tl.load(rows.key + row).to(tl.uint64, bitcast=True)
    last_key, num_equal = last_kept(rows, searches, row, filters, shape)
    is_partial, rank = num_equal < ALL_EQUAL, tl.full((), 0, tl.int32)
    for start in range(0, tl.where(is_partial, begin, 0), shape.tile_tokens):  # equal tokens of former parts
        _, logit_X = load_tile(rows, row, start, shape)
        _, key_X = scale(logit_X, largest, temperature)
        rank += tl.sum((key_X == last_key).to(tl.int32), 0)
    best, best_id = tl.full((), float("-inf"), tl.float64), begin
    near = tl.full((), float("-inf"), tl.float32)
    for start in range(begin, end, shape.tile_tokens):
        id_X, logit_X = load_tile(rows, row, start, shape)
        scaled_X, key_X = scale(logit_X, largest, temperature)
        is_kept_X = key_X <= last_key
        if is_partial:
            is_equal_X = (key_X == last_key).to(tl.int32)
            is_kept_X = (key_X < last_key) | ((is_equal_X > 0) & (rank + tl.cumsum(is_equal_X, 0) <= num_equal))
            rank += tl.sum(is_equal_X, 0)
        if tl.max(is_kept_X.to(tl.int32), 0) > 0:
            score_X = tl.where(is_kept_X, scaled_X + noise(hash_tokens(noise_key, id_X)), float("-inf"))
            near = tl.maximum(near, tl.max(score_X, 0) - SLACK)
            is_near_X = score_X >= near
            while tl.max(is_near_X.to(tl.int32), 0) > 0:
                token_id = tl.min(tl.where(is_near_X, id_X, shape.vocab_size), 0)
                is_token_X = id_X == token_id
                score = exact_score(noise_key, token_id, tl.sum(tl.where(is_token_X, scaled_X, 0.0), 0))
                is_better = score > best
                best, best_id = tl.where(is_better, score, best), tl.where(is_better, token_id, best_id)
                is_near_X = is_near_X & (is_token_X == 0)
    at = row * shape.most_parts + tl.program_id(1)
    tl.store(parts.best + at, best)
    tl.store(parts.best_id + at, best_id)


@triton.jit(do_not_specialize=["num_parts"])
def choose_best(rows: DrawnRows, parts: PartResults, tokens: tl.tensor, num_parts: int, shape: tl.constexpr) -> None:
    """Kernel that chooses the token of a row from the results of its parts: the best score or, in a greedy row and in a
    row without a distribution, the largest logit. Grid: (B,)."""
    row = tl.program_id(0).to(tl.int64)
    part_P = tl.arange(0, shape.most_parts)
    at_P, is_part_P = row * shape.most_parts + part_P, part_P < num_parts
    largest_P = tl.load(parts.largest + at_P, mask=is_part_P, other=float("-inf"))
    largest = tl.max(largest_P, 0)
    first = tl.min(tl.where(largest_P == largest, part_P, shape.most_parts), 0)
    token_id = tl.load(parts.largest_id + row * shape.most_parts + first)
    if (tl.load(rows.temperature + row) > 0) & (tl.abs(largest) < float("inf")):
        best_P = tl.load(parts.best + at_P, mask=is_part_P, other=float("-inf"))
        first = tl.min(tl.where(best_P == tl.max(best_P, 0), part_P, shape.most_parts), 0)
        token_id = tl.load(parts.best_id + row * shape.most_parts + first)
    tl.store(tokens + row, tl.where(largest < float("inf"), token_id, NO_TOKEN).to(tl.int64))
