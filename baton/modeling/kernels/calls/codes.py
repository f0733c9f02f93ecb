"""Weights as a checkpoint stores them: codes of 4, 6 or 8 bits, with scales for groups of inputs. The linear kernel
multiplies by them, or dequantises them first (baton/modeling/kernels/linear/codes.h describes the memory layout).

The formats of `baton.modeling.quantized` create `StoredWeight` objects, and `baton.modeling.forward.linear` packs them.

Shape letters: N rows (outputs) and K columns (inputs) of a weight, M outputs (a multiple of 32), P = M / 32 panels, U =
K / 32 units, G groups of inputs that share a scale, S groups of inputs that share a factor of the scale, F fields: 1
(scales), or 2 (scales and offsets).
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.modeling.kernels.calls.checks import require
from baton.modeling.kernels.calls.panels import PANEL, BoundPanels, checked_places

UNIT = 32
"""Number of inputs in a unit. The codes of a unit's inputs and a panel's 32 outputs are stored together."""
HALF_UNIT = 16
"""The number of inputs that share a scale must be a multiple of this number."""
Keep = Callable[[Tensor], Tensor]
"""Function that copies a tensor to the memory in which weights are kept."""
_CODE_TYPES = {4: torch.uint8, 6: torch.uint8, 8: torch.int8}
"""Torch dtypes of codes, by number of bits. Codes of 8 bits have a sign."""


@dataclass(frozen=True)
class StoredWeight:
    """Quantised weight. Its values are `scale * code + offset`, rounded once to fp32. The scale (and the offset) of a
    value is that of its group, times the factor of its group of factors if there are factors."""

    bits: int
    codes_NK: Tensor
    """Codes, in a byte each: uint8 for 4 and 6 bits, int8 for 8 bits."""
    scales_NGF: Tensor
    """Scales, and offsets if F is 2, in fp16 or fp32. G divides K."""
    factors_NSF: Tensor | None = None
    """Factors of scales and offsets, in int8. S divides K. None: all factors are 1."""
    zero: int = 0
    """Code that represents the value 0, if F is 1."""

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the weight, (N, K)."""
        return self.codes_NK.shape[0], self.codes_NK.shape[1]

    @property
    def is_supported(self) -> bool:
        """Return True if the linear kernel can multiply by this weight."""
        tensors = [self.scales_NGF] if self.factors_NSF is None else [self.scales_NGF, self.factors_NSF]
        num_inputs = self.shape[1]
        are_groups = all(num_inputs % (HALF_UNIT * each.shape[1]) == 0 for each in tensors)
        return num_inputs % UNIT == 0 and are_groups and self.scales_NGF.dtype in (torch.float16, torch.float32)

    def with_rows(self, change: Callable[[Tensor], Tensor]) -> "StoredWeight":
        """Return a weight with other rows: `change` is applied to each tensor, whose first dimension is the rows."""
        factors = None if self.factors_NSF is None else change(self.factors_NSF)
        return dataclasses.replace(
            self, codes_NK=change(self.codes_NK), scales_NGF=change(self.scales_NGF), factors_NSF=factors
        )


def joined(parts: Sequence[StoredWeight]) -> StoredWeight | None:
    """Return the weight that contains the rows of all parts, with unchanged values. If parts are stored in different
    ways, the result has the largest number of bits and the smallest groups of all parts. Return None
    if only some parts have factors."""
    if len({(each.bits, each.zero, each.scales_NGF.shape[2]) for each in parts}) > 1:
        parts = [_with_offsets(each, max(part.bits for part in parts)) for each in parts]
    factors = [each.factors_NSF for each in parts if each.factors_NSF is not None]
    if len(factors) not in (0, len(parts)):
        return None
    return dataclasses.replace(
        parts[0],
        codes_NK=torch.cat([each.codes_NK for each in parts]),
        scales_NGF=narrowed(_joined_groups([each.scales_NGF.float() for each in parts])),
        factors_NSF=_joined_groups(factors) if factors else None,
    )


def _with_offsets(weight: StoredWeight, bits: int) -> StoredWeight:
    """Return the same weight with offsets, and with codes of `bits` bits."""
    scales_NGF, factors_NSF = weight.scales_NGF.float(), weight.factors_NSF
    if scales_NGF.shape[2] == 1:
        scales_NGF = torch.cat((scales_NGF, -weight.zero * scales_NGF), 2)
        factors_NSF = None if factors_NSF is None else factors_NSF.expand(-1, -1, 2)
    codes_NK = weight.codes_NK.to(_CODE_TYPES[bits])
    return StoredWeight(bits, codes_NK, scales_NGF, factors_NSF)


def _joined_groups(parts: Sequence[Tensor]) -> Tensor:
    """Return the rows of all parts, `[N, G, F]`. Each group of a part becomes one or more groups."""
    num_groups = math.lcm(*(each.shape[1] for each in parts))
    return torch.cat([each.repeat_interleave(num_groups // each.shape[1], 1) for each in parts])


def narrowed(values: Tensor) -> Tensor:
    """Return numbers in fp16 if fp16 can represent all of them, else in fp32."""
    halves = values.half()
    return halves if torch.equal(halves.to(values.dtype), values) else values.float()


@dataclass(frozen=True)
class PackedCodes:
    """Codes in the memory layout of the linear kernel, for all multiplication methods."""

    bits: int
    zero: int
    panels: Tensor
    """Codes of all panels, as bytes."""
    scales: Tensor
    factors: Tensor | None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return all tensors of the weight."""
        return self.panels, self.scales, self.factors


def pack_codes(weight: StoredWeight, keep: Keep) -> PackedCodes:
    """Pack a weight whose number of rows is a multiple of 32. `keep` copies a tensor to the memory in which weights are
    kept."""
    require(weight.is_supported and len(weight.codes_NK) % PANEL == 0, "groups are not multiples of 16 inputs")
    factors = None if weight.factors_NSF is None else keep(_by_panel(weight.factors_NSF))
    panels = keep(_packed(_lanes(weight.codes_NK), weight.bits))
    return PackedCodes(weight.bits, weight.zero, panels, keep(_by_panel(weight.scales_NGF)), factors)


def bind_codes(
    codes: PackedCodes, sizes: tuple[int, int], bias: Tensor | None, *, gated: bool, product: str
) -> BoundPanels:
    """Return packed codes as kernel arguments. `sizes`: number of inputs and number of outputs. The bias must have one
    number for each output of the panels. `product` is a multiplication method of `baton.modeling.kernels.products`."""
    num_inputs, num_outputs = sizes
    scales, num_panels = codes.scales, len(codes.panels)
    require(
        num_outputs <= num_panels * PANEL // (2 if gated else 1), f"the weight has fewer outputs than {num_outputs}"
    )
    # the fields of the struct Codes in linear/codes.h
    fields = codes.bits, codes.zero, scales.shape[2], scales.dtype == torch.float16
    of_factors = (0, 0, 0) if codes.factors is None else _described(codes.factors, num_inputs)
    described = torch.tensor([*fields, *_described(scales, num_inputs), *of_factors])
    return BoundPanels(
        (*codes.tensors, described, bias),
        *(num_inputs, num_outputs, gated, product.encode()),
        (codes.panels.data_ptr(), num_panels, num_inputs, num_outputs, None, checked_places(bias, num_panels)),
        is_int8=False,
        codes=described.data_ptr(),
    )


def _described(values_PGFL: Tensor, num_inputs: int) -> tuple[int, int, int]:
    """Return the number of inputs of a group, the number of groups, and the address of their scales or factors."""
    num_groups = values_PGFL.shape[1]
    return num_inputs // num_groups, num_groups, values_PGFL.data_ptr()


def _lanes(codes_MK: Tensor) -> Tensor:
    """Return codes in the order in which the kernel reads them, `[P, U, eights of a unit, 2, 4, lanes]`. An eight has 4
    pairs of inputs. A lane is an output."""
    num_rows, num_inputs = codes_MK.shape
    return codes_MK.view(num_rows // PANEL, PANEL, num_inputs // UNIT, UNIT // 8, 4, 2).permute(0, 2, 3, 5, 4, 1)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Pack codes `[P, U, eights of a unit, 2, 4, lanes]` as bytes, `[P, U, bytes]`."""
    require(codes.dtype == _CODE_TYPES[bits], f"codes of {bits} bits have another type than {codes.dtype}")
    if bits == 8:
        return codes.permute(0, 1, 2, 4, 5, 3).flatten(2).view(torch.uint8)
    lower = _in_words((codes & 15).flatten(3, 4), 4)
    if bits == 4:
        return lower
    # a word contains the upper bits of two eights, of whose codes the first four are in the word's lower half
    of_words = (codes >> 4).reshape(*codes.shape[:2], -1, 2, *codes.shape[3:]).transpose(3, 4)
    return torch.cat((lower, _in_words(of_words.flatten(3, 5), 2)), 2)


def _in_words(codes: Tensor, bits: int) -> Tensor:
    """Pack codes `[P, U, words of a lane, codes of a word, lanes]` into 32-bit words, beginning with the lowest bits.
    Return bytes `[P, U, bytes]`."""
    in_bytes = codes.reshape(*codes.shape[:3], 4, 8 // bits, codes.shape[4])
    packed = in_bytes[..., 0, :].clone()
    for place in range(1, 8 // bits):
        packed |= in_bytes[..., place, :] << bits * place
    return packed.transpose(-1, -2).flatten(2)


def _by_panel(values_NGF: Tensor) -> Tensor:
    """Return scales or factors in the order of the panels, `[P, G, F, 32]`."""
    return values_NGF.view(-1, PANEL, *values_NGF.shape[1:]).permute(0, 2, 3, 1).contiguous()
