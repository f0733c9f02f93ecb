"""Quantised weights as codes, scales and zero points: the common form of all formats of quantised weights.

The formats in this folder make them when a model is loaded, and `baton.modeling.families.checkpoint` dequantises them,
some rows at a time. Each value is `(code - zero) * scale`, computed in fp32. It is exact except for the product's
rounding.

N rows, K columns of a weight (its outputs and inputs). R rows, C columns of its scales. W words.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.modeling.families.checkpoint import Shapes, StoredTensors
from baton.modeling.kv.buffers import TORCH_DTYPES

SCALE_TYPES = tuple(TORCH_DTYPES.values())
"""Supported types of scales."""
WORD_BITS = 32


@dataclass(frozen=True)
class ScaleGrid:
    """Mapping from each value of a weight `[N, K]` to one of its scales `[R, C]`."""

    shape: tuple[int, int]
    """Shape of the scales: (R, C)."""
    rows_a_scale: int = 1
    """Number of neighbouring rows of the weight that share one row of scales."""
    columns_K: Tensor | None = None
    """Column of the scales for each input. None: all inputs share one column."""
    spellings: tuple[tuple[int, ...], ...] = ()
    """Other shapes in which the same scales may be stored."""

    @classmethod
    def of_whole(cls, shape: tuple[int, ...]) -> "ScaleGrid":
        """Return the grid that shares one scale among all values."""
        return cls((1, 1), shape[0], spellings=((), (1,)))

    @classmethod
    def of_rows(cls, shape: tuple[int, ...]) -> "ScaleGrid":
        """Return the grid that gives each row a scale."""
        return cls((shape[0], 1), spellings=((shape[0],),))

    @classmethod
    def of_groups(cls, shape: tuple[int, ...], group_size: int | None) -> "ScaleGrid":
        """Return the grid that gives each row a scale for each group of `group_size` consecutive inputs. None: all
        inputs are one group."""
        groups_K = torch.arange(shape[1]) // (group_size or shape[1])
        return cls((shape[0], int(groups_K[-1]) + 1), columns_K=groups_K)

    @classmethod
    def of_blocks(cls, shape: tuple[int, ...], block: tuple[int, int]) -> "ScaleGrid":
        """Return the grid that gives each block of rows and inputs a scale. Blocks at the edges may be smaller."""
        (num_rows, num_columns), (rows, columns) = shape, block
        columns_K = torch.arange(num_columns) // columns
        return cls((-(-num_rows // rows), int(columns_K[-1]) + 1), rows, columns_K)

    def allowed(self, *types: torch.dtype) -> Shapes:
        """Return the shapes in which scales of these types may be stored."""
        return dict.fromkeys(types, (self.shape, *self.spellings))

    def of_each(self, values_RC: Tensor, start: int, stop: int) -> Tensor:
        """Return the value in `values_RC` for each value in rows `start` to `stop` of the weight: `[stop - start, K]`,
        or `[stop - start, 1]` if all inputs share one column."""
        values_NC = values_RC[torch.arange(start, stop) // self.rows_a_scale]
        return values_NC if self.columns_K is None else values_NC.index_select(1, self.columns_K)


@dataclass(frozen=True)
class ScaledWeight:
    """A quantised weight `[N, K]`, which is dequantised some rows at a time."""

    codes: Callable[[int, int], Tensor]
    """(start, stop) -> the codes of these rows in fp32, in a new tensor. `start` is a multiple of 32."""
    grid: ScaleGrid
    scales: Tensor
    """Scales in a shape that the grid allows, of any floating type."""
    zeros_RC: Tensor | None = None
    """Codes that represent zero. None: code 0."""

    def rows(self, start: int, stop: int) -> Tensor:
        """Return rows `start` to `stop` of the weight, in fp32. `start` is a multiple of 32."""
        values_NK = self.codes(start, stop)
        if self.zeros_RC is not None:
            values_NK -= self.grid.of_each(self.zeros_RC, start, stop)
        values_NK *= self.grid.of_each(self.scales.float().view(self.grid.shape), start, stop)
        return values_NK


def unpack(words: Tensor, bits: int) -> Tensor:
    """Return the unsigned numbers of 4 or 8 bits that int32 words hold, from the lowest bits to the highest, in a new
    last dimension, as uint8. Works byte by byte, which is faster than shifting words."""
    assert sys.byteorder == "little"
    parts = words.contiguous().view(torch.uint8).view(*words.shape, WORD_BITS // 8)
    return parts if bits == 8 else torch.stack((parts & 15, parts >> 4), -1).flatten(-2)


def fp8_values(codes: Tensor) -> Tensor:
    """Return the values of e4m3 codes in fp32, from a table. Torch's conversion takes several times as long."""
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return table.index_select(0, codes.contiguous().view(torch.uint8).flatten().int()).view(codes.shape)


def num_words(count: int, bits: int) -> int:
    """Return the number of words that hold `count` numbers of `bits` bits each. `bits` divides a word's size."""
    return -(-count * bits // WORD_BITS)


def read_groups(tensors: StoredTensors, name: str, in_order: ScaleGrid, *, required: bool) -> Tensor:
    """Return the group of each input, `[K]`, from the tensor `name`, or from `in_order` if the tensor is absent or was
    never filled. `required`: the inputs were reordered. Raises ModelError for an unknown group, and for a tensor that
    is absent or was never filled although it is required and the weight has several groups."""
    assert in_order.columns_K is not None
    required = required and in_order.shape[1] > 1
    if not required and not tensors.has(name):
        return in_order.columns_K
    shapes = [tuple(in_order.columns_K.shape)]
    groups_K = tensors.stored(name, {torch.int32: shapes, torch.int64: shapes}).long()
    # Tools that do not reorder inputs leave zeros, or -1, in the tensor.
    is_empty = bool((groups_K == 0).all()) or bool((groups_K == -1).all())
    if is_empty and not required:
        return in_order.columns_K
    if is_empty or int(groups_K.min()) < 0 or int(groups_K.max()) >= in_order.shape[1]:
        problem = f"does not name one of {in_order.shape[1]} groups for each input"
        raise tensors.error(name, problem, "download the model again")
    return groups_K
