"""Triton kernels that copy between memory addresses, one word (2 or 4 bytes) at a time. Imports Triton.

Shape letters: B sequences, G kv heads, K pairs of a tile, W words of a head (padded).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl


@dataclass(frozen=True)
class HeadShape:
    """Compile-time parameters of `copy_pairs`. Each combination of values is compiled separately."""

    num_kv_heads: int
    head_words: int
    head_pad: int
    tile_pairs: int
    word_bytes: int


class Pairs(NamedTuple):
    """Kernel argument: for each sequence and kv head, a list of pairs (index of a key at the source, its index at the
    target). The fields are the address of all lists, and the address of their lengths."""

    pairs: Any
    num: Any


@triton.jit
def pointed(addresses: tl.tensor, row: tl.tensor, word_bytes: tl.constexpr) -> tl.tensor:
    """Load the address of a sequence and return it as a pointer to words."""
    word: tl.constexpr = tl.int32 if word_bytes == 4 else tl.int16
    return tl.load(addresses + row).to(tl.pointer_type(word))


@triton.jit(do_not_specialize=["most"])
def copy_pairs(source: tl.tensor, target: tl.tensor, lists: Pairs, most: int, shape: tl.constexpr) -> None:
    """Kernel that copies one tile of keys and values of one sequence and kv head. `most` is the maximum length of a
    list. Grid: (B * G, tiles of pairs)."""
    list_at = tl.program_id(0).to(tl.int64)
    kv_head = list_at % shape.num_kv_heads
    first = tl.program_id(1) * shape.tile_pairs
    num_pairs = tl.load(lists.num + list_at)
    if first >= num_pairs:
        return
    pair_K = first + tl.arange(0, shape.tile_pairs)
    is_pair_K = pair_K < num_pairs
    pair_at_K = lists.pairs + (list_at * most + pair_K) * 2
    key_K = tl.load(pair_at_K, mask=is_pair_K, other=0).to(tl.int64)
    place_K = tl.load(pair_at_K + 1, mask=is_pair_K, other=0).to(tl.int64)
    word_W = tl.arange(0, shape.head_pad)
    is_word_KW = is_pair_K[:, None] & (word_W < shape.head_words)[None, :]
    row = list_at // shape.num_kv_heads
    from_head = pointed(source, row, shape.word_bytes) + kv_head * shape.head_words
    to_head = pointed(target, row, shape.word_bytes) + kv_head * shape.head_words
    all_heads = shape.num_kv_heads * shape.head_words
    from_KW = from_head + key_K[:, None] * (2 * all_heads) + word_W[None, :]
    to_KW = to_head + place_K[:, None] * (2 * all_heads) + word_W[None, :]
    key_KW = tl.load(from_KW, mask=is_word_KW, other=0)
    value_KW = tl.load(from_KW + all_heads, mask=is_word_KW, other=0)
    tl.store(to_KW, key_KW, mask=is_word_KW)
    tl.store(to_KW + all_heads, value_KW, mask=is_word_KW)


@triton.jit(do_not_specialize=["num_words"])
def copy_words(
    source: tl.tensor, target: tl.tensor, num_words: int, tile_words: tl.constexpr, word_bytes: tl.constexpr
) -> None:
    """Kernel that copies one tile of words of one sequence. Grid: (B, tiles of words)."""
    row = tl.program_id(0)
    word_W = tl.program_id(1) * tile_words + tl.arange(0, tile_words)
    word_W = word_W.to(tl.int64)
    is_word_W = word_W < num_words
    from_W = pointed(source, row, word_bytes) + word_W
    to_W = pointed(target, row, word_bytes) + word_W
    tl.store(to_W, tl.load(from_W, mask=is_word_W, other=0), mask=is_word_W)
