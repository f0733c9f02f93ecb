"""Quantised weights as codes, scales and zero points. All formats of quantised weights are converted to this form.

The formats in this folder create ScaledWeight objects when a model is loaded. `baton.modeling.families.checkpoint`
dequantises them, some rows at a time. Each value is `(code - zero) * scale`, computed in fp32. The only rounding is
that of the product.

Legend: N rows and K columns of a weight (its outputs and inputs), R rows and C columns of its scales, W words.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.modeling.families.checkpoint import QuantisedWeight, Shapes, StoredTensors
from baton.modeling.kernels.calls.codes import StoredWeight, narrowed
from baton.modeling.kv.buffers import TORCH_DTYPES

SCALE_TYPES = tuple(TORCH_DTYPES.values())
"""Supported torch dtypes of scales."""
WORD_BITS = 32
_PART_ROWS = 1024
"""Number of rows whose codes are converted at a time. A multiple of 32."""
_CODE_RANGES = ((0, 15, 4, 0), (-8, 7, 4, 8), (-128, 127, 8, 0), (0, 255, 8, -128))
"""Ranges of codes: the lowest code, the highest, the number of bits of a `StoredWeight` that contains them, and the
number that it adds to each."""


@dataclass(frozen=True)
class ScaleGrid:
    """Mapping from each value of a weight `[N, K]` to the scale by which it is multiplied. The scales have the shape
    `[R, C]`."""

    shape: tuple[int, int]
    """Shape of the scales: (R, C)."""
    rows_a_scale: int = 1
    """Number of neighbouring rows of the weight that share one row of scales."""
    columns_K: Tensor | None = None
    """Index of the column of scales that each of the K inputs uses. None: there is one column, which all inputs use."""
    spellings: tuple[tuple[int, ...], ...] = ()
    """Alternative shapes in which a checkpoint may store the same scales, for example `(R,)` instead of `(R, 1)`."""

    @classmethod
    def of_whole(cls, shape: tuple[int, ...]) -> "ScaleGrid":
        """Return the grid with one scale for all values of a weight of this shape."""
        return cls((1, 1), shape[0], spellings=((), (1,)))

    @classmethod
    def of_rows(cls, shape: tuple[int, ...]) -> "ScaleGrid":
        """Return the grid with one scale for each row of a weight of this shape."""
        return cls((shape[0], 1), spellings=((shape[0],),))

    @classmethod
    def of_groups(cls, shape: tuple[int, ...], group_size: int | None) -> "ScaleGrid":
        """Return the grid with one scale for each row of the weight and each group of `group_size` consecutive inputs.
        `shape` is the shape of the weight. A `group_size` of None means that all inputs are one group."""
        groups_K = torch.arange(shape[1]) // (group_size or shape[1])
        return cls((shape[0], int(groups_K[-1]) + 1), columns_K=groups_K)

    @classmethod
    def of_blocks(cls, shape: tuple[int, ...], block: tuple[int, int]) -> "ScaleGrid":
        """Return the grid with one scale for each block. `shape` and `block` are (outputs, inputs) of the weight and of
        a block. Blocks at the edges of the weight may be smaller."""
        (num_rows, num_columns), (rows, columns) = shape, block
        columns_K = torch.arange(num_columns) // columns
        return cls((-(-num_rows // rows), int(columns_K[-1]) + 1), rows, columns_K)

    def allowed(self, *types: torch.dtype) -> Shapes:
        """Return the shapes in which a checkpoint may store the scales, for each of the dtypes `types`."""
        return dict.fromkeys(types, (self.shape, *self.spellings))

    def of_each(self, values_RC: Tensor, start: int, stop: int) -> Tensor:
        """Expand `values_RC`, for example scales, to the rows `start` to `stop` of the weight. The result has the shape
        `[stop - start, K]`, or `[stop - start, 1]` if all inputs share one column."""
        values_NC = values_RC[torch.arange(start, stop) // self.rows_a_scale]
        return values_NC if self.columns_K is None else values_NC.index_select(1, self.columns_K)


@dataclass(frozen=True)
class ScaledWeight(QuantisedWeight):
    """Quantised weight `[N, K]`. The method `rows` dequantises some of its rows at a time."""

    codes: Callable[[int, int], Tensor]
    """Function (start, stop) that returns the codes of the rows `start` to `stop` in fp32, in a new tensor. `start`
    must be a multiple of 32."""
    grid: ScaleGrid
    scales: Tensor
    """Scales of any floating-point type, in one of the shapes that `grid.allowed` returns."""
    zeros_RC: Tensor | None = None
    """Zero points `[R, C]`: the codes that represent the value 0. None: code 0 represents the value 0."""
    has_integers: bool = True
    """True if codes and zero points are integers."""

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the dequantised rows `start` to `stop` (exclusive) of the weight, in fp32. `start` must be a multiple
        of 32."""
        values_NK = self.codes(start, stop)
        if self.zeros_RC is not None:
            values_NK -= self.grid.of_each(self.zeros_RC, start, stop)
        values_NK *= self.grid.of_each(self.scales.float().view(self.grid.shape), start, stop)
        return values_NK

    def stored(self) -> StoredWeight | None:
        num_rows, num_groups = self.grid.shape
        columns_K = self.grid.columns_K
        if not self.has_integers or self.grid.rows_a_scale != 1:
            return None
        if columns_K is not None and not torch.equal(columns_K, _in_order(len(columns_K), num_groups)):
            return None
        parts = [self.codes(at, min(at + _PART_ROWS, num_rows)).short() for at in range(0, num_rows, _PART_ROWS)]
        lowest, highest = min(int(each.min()) for each in parts), max(int(each.max()) for each in parts)
        bits, shift = next(each[2:] for each in _CODE_RANGES if each[0] <= lowest and highest <= each[1])
        scales_NG = self.scales.double().view(self.grid.shape)
        zeros_NG = shift + (torch.zeros_like(scales_NG) if self.zeros_RC is None else self.zeros_RC.double())
        offsets_NG = -zeros_NG * scales_NG
        if not torch.equal(offsets_NG, offsets_NG.float().double()):
            return None  # an offset would be rounded, and then the sum again; or is NaN
        is_same = bool((zeros_NG == zeros_NG[0, 0]).all())
        fields = [scales_NG] if is_same else [scales_NG, offsets_NG]
        codes_NK = torch.cat([(each + shift).to(torch.int8 if bits == 8 else torch.uint8) for each in parts])
        zero = int(zeros_NG[0, 0]) if is_same else 0
        return StoredWeight(bits, codes_NK, narrowed(torch.stack(fields, -1)), zero=zero)


def _in_order(num_inputs: int, num_groups: int) -> Tensor:
    """Return the group of each input, `[K]`, if groups have equal sizes and consecutive inputs."""
    return torch.arange(num_inputs) * num_groups // num_inputs


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 words into unsigned numbers of `bits` (4 or 8) bits, as uint8. The result has one more dimension,
    which holds the numbers of a word, beginning with the lowest bits. Words are split into bytes, because this is
    faster than shifting the words."""
    assert sys.byteorder == "little"
    parts = words.contiguous().view(torch.uint8).view(*words.shape, WORD_BITS // 8)
    return parts if bits == 8 else torch.stack((parts & 15, parts >> 4), -1).flatten(-2)


def fp8_values(codes: Tensor) -> Tensor:
    """Return the values of e4m3 codes in fp32. The values are looked up in a table, which is several times as fast as
    torch's conversion."""
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return table.index_select(0, codes.contiguous().view(torch.uint8).flatten().int()).view(codes.shape)


def num_words(count: int, bits: int) -> int:
    """Return the number of 32-bit words that hold `count` numbers of `bits` bits each. 32 must be a multiple of
    `bits`."""
    return -(-count * bits // WORD_BITS)


def read_groups(tensors: StoredTensors, name: str, in_order: ScaleGrid, *, required: bool) -> Tensor:
    """Return the index of the group of each input, `[K]`, from the checkpoint's tensor `name`.

    `required` is True if the inputs were reordered, because their groups are then known only from this tensor. If the
    tensor does not exist or was never filled, the result depends on `required` and on the number of groups. If
    `required` is True and the weight has several groups, raises ModelError. Otherwise returns the groups of `in_order`,
    which consist of consecutive inputs. Also raises ModelError for an invalid group index.
    """
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
