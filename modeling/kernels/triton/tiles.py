"""Block sizes of the Triton kernels: all are chosen here.

Those of 16-bit dtypes with head dim 128 were measured on an H100 (docs/devices.md, "What a GPU reached"); all others
rest on the sizes of registers and shared memory. Where a GPU's shared memory is not known to hold more, a program's
keys and values, two stages of them, take at most 64 KiB of it, and its queries at most 32 KiB.
"""

from dataclasses import dataclass

import torch

LEAST_SIDE = 16
"""Least side of a matrix that tensor cores multiply; smaller ones are padded to it."""
_STAGE_BYTES = 32 * 1024
"""Most bytes of keys and values that a program loads at once."""
_QUERY_BYTES = 32 * 1024
"""Most bytes of a program's queries."""
LEAST_SPLIT_KEYS = 512
"""Keys of a list up to which one program reads all of them."""
_MOST_SPLITS = 64
_WIDE_TILES = ((128, 3), (128, 2), (64, 3))
"""Keys and stages of a prefill's tiles of 128 queries, the fastest first."""


@dataclass(frozen=True)
class DecodeTiles:
    """How decode attention is divided among programs. All sizes but `num_splits` are powers of two."""

    rows: int
    """Pairs of a query and a head that a program serves from one reading of keys."""
    keys: int
    """Keys that a program multiplies at a time."""
    split_keys: int
    """Keys that a program reads, a multiple of `keys`: a row's list of keys is cut after so many."""
    num_splits: int
    """Programs that share the longest list of keys. Their results are merged."""
    num_warps: int
    num_stages: int = 2


@dataclass(frozen=True)
class PrefillTiles:
    """How prefill attention is divided among programs, one for each head and block of queries."""

    rows: int
    """Queries of a program, a power of two."""
    keys: int
    """Keys that a program multiplies at a time, a power of two."""
    num_warps: int
    num_stages: int = 2


def decode_tiles(head_dim: int, dtype: torch.dtype, num_pairs: int, most_keys: int) -> DecodeTiles:
    """Return the tiles for rows of at most `num_pairs` pairs of a query and a head of one kv head, each pair attending
    to at most `most_keys` keys."""
    rows = min(max(power_of_two(num_pairs), LEAST_SIDE), _most_rows(head_dim, dtype), 64)
    keys = _keys(head_dim, dtype)
    split_keys = max(LEAST_SPLIT_KEYS, power_of_two(-(-most_keys // _MOST_SPLITS)))
    num_warps = 8 if rows * padded(head_dim) >= 64 * 256 or dtype == torch.float32 else 4
    return DecodeTiles(rows, keys, split_keys, max(-(-most_keys // split_keys), 1), num_warps)


def prefill_tiles(head_dim: int, dtype: torch.dtype, num_queries: int, shared_bytes: int | None = None) -> PrefillTiles:
    """Return the tiles for so many queries. `shared_bytes`: shared memory that a program may take, if that is known,
    and nothing but queries, keys and values lies there."""
    most_rows = 32 if dtype == torch.float32 else 128  # fp32 operands are multiplied in registers
    rows = min(max(power_of_two(num_queries), LEAST_SIDE), _most_rows(head_dim, dtype), most_rows)
    if rows == 128 and shared_bytes is not None:
        row_bytes = padded(head_dim) * dtype.itemsize
        for keys, num_stages in _WIDE_TILES:
            if (rows + 2 * keys * num_stages) * row_bytes <= shared_bytes:
                return PrefillTiles(rows, keys, 8, num_stages)
    return PrefillTiles(rows, _keys(head_dim, dtype), 8 if rows == 128 or dtype == torch.float32 else 4)


def power_of_two(number: int) -> int:
    """Return the least power of two that is not below `number`, which is positive."""
    return 1 << (number - 1).bit_length()


def padded(head_dim: int) -> int:
    """Return the width of tiles that hold heads of `head_dim`; what lies behind a head is masked."""
    return max(power_of_two(head_dim), LEAST_SIDE)


def _most_rows(head_dim: int, dtype: torch.dtype) -> int:
    return max(_QUERY_BYTES // (padded(head_dim) * dtype.itemsize), LEAST_SIDE)


def _keys(head_dim: int, dtype: torch.dtype) -> int:
    return min(max(_STAGE_BYTES // (2 * padded(head_dim) * dtype.itemsize), LEAST_SIDE), 64)
