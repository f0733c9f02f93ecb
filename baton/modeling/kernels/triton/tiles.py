"""Block sizes of all Triton kernels.

The block sizes for 16-bit dtypes with head dim 128 were measured on an H100 (docs/devices.md, "What a GPU reached").
All others are derived from the sizes of registers and shared memory. By default, a program uses at most 64 KiB of
shared memory for two stages of keys and values, and at most 32 KiB for queries. It may use more if the GPU is known to
have more shared memory.
"""

from dataclasses import dataclass, replace

import torch

_ALIKE = 16
LEAST_SIDE = 16
"""Minimum number of rows and columns of a matrix that tensor cores multiply. Smaller matrices are padded."""
_STAGE_BYTES = 32 * 1024
"""Maximum number of bytes of keys and values that a program loads at once."""
_QUERY_BYTES = 32 * 1024
"""Maximum number of bytes of a program's queries."""
MOST_QUERIES = 16
"""Maximum number of new tokens of a sequence that decode attention serves. It is at least one token with the maximum
number of drafts. Prefill attention over pages serves sequences with more new tokens."""
LEAST_SPLIT_KEYS = 512
"""Minimum number of keys of a split (part of a list of keys that one program reads). A list of at most this many keys
is not divided."""
_MOST_SPLITS = 64
_MOST_ROWS = 128
"""Maximum number of rows of a program of prefill attention."""
_PAGE_NUMBER_BYTES = 2048
"""Upper bound on the shared memory for the page numbers of keys."""
_WIDE_TILES = ((128, 3), (128, 2), (64, 3))
"""Tile sizes of prefill attention with blocks of 128 queries, as pairs (keys of a tile, pipeline stages). The fastest
is first."""


@dataclass(frozen=True)
class DecodeTiles:
    """Block sizes of decode attention. All sizes are powers of two."""

    rows: int
    """Number of pairs of a query and a head that a program computes. It reads the keys once for all pairs."""
    keys: int
    """Number of keys that a program multiplies at a time."""
    split_keys: int
    """Number of keys of a split, which one program reads. A multiple of `keys`."""
    num_warps: int
    num_stages: int = 2


@dataclass(frozen=True)
class PrefillTiles:
    """Block sizes of prefill attention, over one segment of keys or over pages."""

    rows: int
    """Number of queries of a program, a power of two. Over pages: number of pairs of a query and a head."""
    keys: int
    """Number of keys that a program multiplies at a time, a power of two."""
    num_warps: int
    num_stages: int = 2


def decode_tiles(head_dim: int, dtype: torch.dtype, group: int, most_keys: int) -> DecodeTiles:
    """Return the block sizes of decode attention. `group`: number of query heads that share a kv head. `most_keys`:
    maximum number of keys to which a sequence attends in any step. The block sizes do not depend on the step."""
    rows = min(max(power_of_two(group), LEAST_SIDE), _most_rows(head_dim, dtype), 64)
    split_keys = max(LEAST_SPLIT_KEYS, power_of_two(-(-most_keys // _MOST_SPLITS)))
    num_warps = 8 if rows * padded(head_dim) >= 64 * 256 or dtype == torch.float32 else 4
    return DecodeTiles(rows, _keys(head_dim, dtype), split_keys, num_warps)


def prefill_tiles(head_dim: int, dtype: torch.dtype, num_queries: int, shared_bytes: int | None = None) -> PrefillTiles:
    """Return the block sizes of prefill attention for `num_queries` queries. `shared_bytes`: bytes of shared memory
    that a program may use for queries, keys and values. None: use the default limits (see the module's docstring). Pass
    None if the number is unknown, or if shared memory also holds other data, such as a mask."""
    most_rows = 32 if dtype == torch.float32 else _MOST_ROWS  # fp32 operands are multiplied in registers
    rows = min(max(power_of_two(num_queries), LEAST_SIDE), _most_rows(head_dim, dtype), most_rows)
    if rows == _MOST_ROWS and shared_bytes is not None:
        row_bytes = padded(head_dim) * dtype.itemsize
        for keys, num_stages in _WIDE_TILES:
            if (rows + 2 * keys * num_stages) * row_bytes <= shared_bytes:
                return PrefillTiles(rows, keys, 8, num_stages)
    return PrefillTiles(rows, _keys(head_dim, dtype), 8 if rows == _MOST_ROWS or dtype == torch.float32 else 4)


def span_tiles(head_dim: int, dtype: torch.dtype, shared_bytes: int | None) -> PrefillTiles:
    """Return the block sizes of prefill attention over pages. They are the same for sequences with any number of new
    tokens. `shared_bytes`: bytes of shared memory that a program may use, or None if the number is unknown.

    Triton's pipeline loads page numbers before keys, and needs two stages for each further tile of keys. The number of
    tiles in shared memory is then that of `prefill_tiles`."""
    room = None if shared_bytes is None else shared_bytes - _PAGE_NUMBER_BYTES
    tiles = prefill_tiles(head_dim, dtype, _MOST_ROWS, room)
    return replace(tiles, num_stages=2 * tiles.num_stages - 1)


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`, which must be positive."""
    return 1 << (number - 1).bit_length()


def alike(number: int) -> int:
    """Return the smallest multiple of 16 that is at least `number`. Triton compiles one kernel for all strides that are
    multiples of 16, and for all addresses that are multiples of 16 bytes, and further kernels for others."""
    return -(-number // _ALIKE) * _ALIKE


def padded(head_dim: int) -> int:
    """Return the width of a tile for heads of `head_dim` elements. Elements beyond the head are masked."""
    return max(power_of_two(head_dim), LEAST_SIDE)


def _most_rows(head_dim: int, dtype: torch.dtype) -> int:
    return max(_QUERY_BYTES // (padded(head_dim) * dtype.itemsize), LEAST_SIDE)


def _keys(head_dim: int, dtype: torch.dtype) -> int:
    return min(max(_STAGE_BYTES // (2 * padded(head_dim) * dtype.itemsize), LEAST_SIDE), 64)
