"""Arguments of the sampler's kernels, and Triton functions that read logits. Imports Triton.

Tokens are ordered by their *key*: the bits of abs((logit - largest logit) / temperature) in fp32. The most likely token
has key 0.

Shape letters: B sequences, V vocabulary size, X tokens of a tile, P parts of a row of logits.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl


@dataclass(frozen=True)
class Digit:
    """Compile-time description of a histogram that counts keys by one of their digits (`filter_kernels`)."""

    index: int
    """Index of the histogram among the five of a row."""
    shift: int
    """Number of bits of a key below the digit."""
    first_bin: int
    num_bins: int
    by_mass: bool = False
    """True if the histogram serves only top-p. The others serve top-k, and the first one serves both."""


@dataclass(frozen=True)
class SamplerShape:
    """Compile-time parameters of the kernels. Each combination of values is compiled separately."""

    vocab_size: int
    tile_tokens: int
    most_parts: int
    """Maximum number of parts into which a row of logits is divided, a power of two. One program processes one part."""
    first: Digit = Digit(0, 20, 0, 2048)
    top_k_second: Digit = Digit(1, 10, 2048, 1024)
    top_k_third: Digit = Digit(2, 0, 3072, 1024)
    top_p_second: Digit = Digit(3, 10, 4096, 1024, by_mass=True)
    top_p_third: Digit = Digit(4, 0, 5120, 1024, by_mass=True)

    @property
    def digits(self) -> tuple[Digit, ...]:
        """Return the digits of a row's histograms, in the order in which they are counted."""
        return self.first, self.top_k_second, self.top_k_third, self.top_p_second, self.top_p_third


class DrawnRows(NamedTuple):
    """Kernel argument: addresses of the contiguous logits `[B, V]` in fp32, and of the drawing parameters `[B]` of the
    sequences, as in `baton.modeling.forward.drawing.Draws`."""

    logits: Any
    key: Any
    top_k: Any
    floor: Any
    top_p: Any
    temperature: Any


class PartResults(NamedTuple):
    """Kernel argument: addresses of results of the parts, `[B, most_parts]`. Each part has the first token with the
    largest logit, and the token with the best score (the sum of scaled logit and noise)."""

    largest: Any
    largest_id: Any
    best: Any
    best_id: Any


@triton.jit
def part_of(shape: tl.constexpr) -> tl.tuple:
    """Return the index of the program's row, and the ids of the first token of its part and of the token after its
    part. A part is a number of whole tiles."""
    num_tiles = tl.cdiv(tl.cdiv(shape.vocab_size, shape.tile_tokens), tl.num_programs(1))
    begin = tl.program_id(1) * num_tiles * shape.tile_tokens
    end = tl.minimum(begin + num_tiles * shape.tile_tokens, shape.vocab_size)
    return tl.program_id(0).to(tl.int64), begin, end


@triton.jit
def load_tile(rows: DrawnRows, row: tl.tensor, start: tl.tensor, shape: tl.constexpr) -> tl.tuple:
    """Return the ids and logits of a tile. Logits beyond the vocabulary are minus infinity."""
    id_X = start + tl.arange(0, shape.tile_tokens)
    at_X = row * shape.vocab_size + id_X
    return id_X, tl.load(rows.logits + at_X, mask=id_X < shape.vocab_size, other=float("-inf"))


@triton.jit
def scale(logit_X: tl.tensor, largest: tl.tensor, temperature: tl.tensor) -> tl.tuple:
    """Return the scaled logits of tokens, rounded as torch rounds them, and their keys."""
    scaled_X = tl.div_rn(logit_X - largest, temperature)
    return scaled_X, tl.abs(scaled_X).to(tl.int32, bitcast=True)


@triton.jit
def largest_logit(parts: PartResults, row: tl.tensor, num_parts: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """Return the largest logit of a row from the results of its parts. It is plus infinity if a logit is NaN."""
    part_P = tl.arange(0, shape.most_parts)
    at_P = row * shape.most_parts + part_P
    return tl.max(tl.load(parts.largest + at_P, mask=part_P < num_parts, other=float("-inf")), 0)
