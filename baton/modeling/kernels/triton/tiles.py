"""Block sizes of the Triton kernels: all are chosen in this module.

Those of 16-bit dtypes with head dim 128 were measured on an H100 (docs/devices.md, "What a GPU reached"). All others
are derived from the sizes of registers and shared memory. Unless a GPU's shared memory is known to hold more, two
stages of a program's keys and values take at most 64 KiB of it, and its queries at most 32 KiB.
"""

from dataclasses import dataclass

import torch

LEAST_SIDE = 16
"""Minimum side of a matrix that tensor cores multiply. Smaller matrices are padded to it."""
_STAGE_BYTES = 32 * 1024
"""Maximum number of bytes of keys and values that a program loads at once."""
_QUERY_BYTES = 32 * 1024
"""Maximum number of bytes of a program's queries."""
LEAST_SPLIT_KEYS = 512
"""Least number of keys of a split. One program reads all keys of a list that is not longer."""
_MOST_SPLITS = 64
_WIDE_TILES = ((128, 3), (128, 2), (64, 3))
"""(keys, stages) of a prefill's tiles of 128 queries, the fastest first."""


@dataclass(frozen=True)
class DecodeTiles:
    """Division of decode attention among programs. All sizes except `num_splits` are powers of two."""

    rows: int
    """Pairs of a query and a head that a program serves from one reading of keys."""
    keys: int
    """Keys that a program multiplies at a time."""
    split_keys: int
    """Keys of a split, which one program reads: a multiple of `keys`."""
    num_splits: int
    """Programs that share the longest list of keys. Their results are merged."""
    num_warps: int
    num_stages: int = 2


@dataclass(frozen=True)
class PrefillTiles:
    """Division of prefill attention among programs, one for each head and block of queries."""

    rows: int
    """Queries of a program, a power of two."""
    keys: int
    """Keys that a program multiplies at a time, a power of two."""
    num_warps: int
    num_stages: int = 2


def decode_tiles(head_dim: int, dtype: torch.dtype, num_pairs: int, most_keys: int) -> DecodeTiles:
    """Return the tiles for sequences with at most `num_pairs` pairs of a query and a head per kv head, each of which
    attends to at most `most_keys` keys."""
    rows = min(max(power_of_two(num_pairs), LEAST_SIDE), _most_rows(head_dim, dtype), 64)
    keys = _keys(head_dim, dtype)
    split_keys = max(LEAST_SPLIT_KEYS, power_of_two(-(-most_keys // _MOST_SPLITS)))
    num_warps = 8 if rows * padded(head_dim) >= 64 * 256 or dtype == torch.float32 else 4
    return DecodeTiles(rows, keys, split_keys, max(-(-most_keys // split_keys), 1), num_warps)


def prefill_tiles(head_dim: int, dtype: torch.dtype, num_queries: int, shared_bytes: int | None = None) -> PrefillTiles:
    """Return the tiles for `num_queries` queries. `shared_bytes`: shared memory that a program may use, if it is known
    and only queries, keys and values are stored there; else None."""
    most_rows = 32 if dtype == torch.float32 else 128  # fp32 operands are multiplied in registers
    rows = min(max(power_of_two(num_queries), LEAST_SIDE), _most_rows(head_dim, dtype), most_rows)
    if rows == 128 and shared_bytes is not None:
        row_bytes = padded(head_dim) * dtype.itemsize
        for keys, num_stages in _WIDE_TILES:
            if (rows + 2 * keys * num_stages) * row_bytes <= shared_bytes:
                return PrefillTiles(rows, keys, 8, num_stages)
    return PrefillTiles(rows, _keys(head_dim, dtype), 8 if rows == 128 or dtype == torch.float32 else 4)


def power_of_two(number: int) -> int:
    """Return the least power of two that is at least `number`, which must be positive."""
    return 1 << (number - 1).bit_length()


def padded(head_dim: int) -> int:
    """Return the width of tiles that hold heads of `head_dim`. Elements beyond a head are masked."""
    return max(power_of_two(head_dim), LEAST_SIDE)


def _most_rows(head_dim: int, dtype: torch.dtype) -> int:
    return max(_QUERY_BYTES // (padded(head_dim) * dtype.itemsize), LEAST_SIDE)


def _keys(head_dim: int, dtype: torch.dtype) -> int:
    return min(max(_STAGE_BYTES // (2 * padded(head_dim) * dtype.itemsize), LEAST_SIDE), 64)
