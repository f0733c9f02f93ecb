"""Memory layouts of weights for the linear kernel (baton/modeling/kernels/linear). A weight is stored as panels of 32
outputs, which the kernel reads sequentially.

`baton.modeling.forward.linear` packs weights with this module. The format depends on the multiplication method and the
dtype.

Shape letters: M outputs (a multiple of 32), K inputs, P = M / 32 panels, J inputs of a panel (K, or K rounded up with
zeros as padding).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.modeling.kernels.calls.checks import optional, require
from baton.modeling.kernels.products import WIDENED

HALF = 16
"""Number of outputs in half a panel (block of 32 outputs of a weight)."""
PANEL = 2 * HALF
_TILE_INPUTS = 32
"""Panels (blocks of 32 outputs of a weight) are padded to a multiple of this number of inputs, except with the
multiplication method `WIDENED`. An AMX tile holds this number of inputs."""


def pack_panels(weight_MK: Tensor, product: str) -> Tensor:
    """Pack a weight into panels of 32 outputs, `[P, J, 32]`. `product` is a multiplication method of
    `baton.modeling.kernels.products`. The order within a panel depends on the dtype and the method.

    - int8: for each input, the weights of all 32 outputs.
    - bf16 with method WIDENED: for each input, the weights of all outputs. Outputs of the first and the second half
      of the panel alternate.
    - bf16 with other methods: for each pair of inputs, the two weights of each output.
    """
    if weight_MK.dtype == torch.int8:
        padded_MJ = weight_MK if product == WIDENED else _deep(weight_MK)
        return padded_MJ.view(-1, PANEL, padded_MJ.shape[1]).transpose(1, 2).contiguous()
    if product == WIDENED:
        num_inputs = weight_MK.shape[1]
        return weight_MK.view(-1, 2, HALF, num_inputs).permute(0, 3, 2, 1).reshape(-1, num_inputs, PANEL)
    padded_MJ = _deep(weight_MK)
    J = padded_MJ.shape[1]
    return padded_MJ.view(-1, PANEL, J // 2, 2).transpose(1, 2).reshape(-1, J, PANEL)


def unpack_rows(panels_PJL: Tensor, at_T: Tensor, num_inputs: int, product: str) -> Tensor:
    """Return rows of a weight, `[T, K]`, read from its panels (blocks of 32 outputs). `at_T` contains the indices of
    the rows. `panels_PJL` must be a result of `pack_panels`."""
    if panels_PJL.dtype == torch.int8:
        return panels_PJL[at_T // PANEL, :num_inputs, at_T % PANEL]
    if product == WIDENED:
        half_T, place_T = at_T % PANEL // HALF, at_T % HALF
        return panels_PJL[at_T // PANEL, :, 2 * place_T + half_T]
    pairs_PIL2 = panels_PJL.view(len(panels_PJL), -1, PANEL, 2)
    return pairs_PIL2[at_T // PANEL, :, at_T % PANEL].flatten(1)[:, :num_inputs]


@dataclass(frozen=True)
class BoundPanels:
    """Checked weights of a linear layer as kernel arguments. The object keeps the tensors allocated."""

    tensors: tuple[Tensor | None, ...]
    num_inputs: int
    num_outputs: int
    gated: bool
    product: bytes
    addresses: tuple[int | None, ...]
    """Kernel arguments in this order: address of the panels (blocks of 32 outputs), number of panels, number of inputs,
    number of outputs, addresses of scales and bias."""
    is_int8: bool
    codes: int | None = None
    """Address of the description of stored codes (`baton.modeling.kernels.calls.codes`). None: the panels contain bf16
    or int8 numbers."""


def bind_panels(
    weights: tuple[Tensor, Tensor | None],
    sizes: tuple[int, int],
    bias: Tensor | None,
    *,
    gated: bool,
    product: str,
) -> BoundPanels:
    """Check the packed weights of a linear layer, and return them as kernel arguments. `weights`: panels (blocks of 32
    outputs), and the scales of int8 weights or None. `sizes`: number of inputs and number of outputs. Scales and bias
    must have one number for each output of the panels."""
    (panels_PJL, scales), (num_inputs, num_outputs) = weights, sizes
    is_int8, P = panels_PJL.dtype == torch.int8, len(panels_PJL)
    fits = panels_PJL.dim() == 3 and panels_PJL.shape[1:] == (depth(product, num_inputs), PANEL)
    require(
        fits and panels_PJL.is_contiguous() and panels_PJL.is_cpu, "the weights are packed for another number of inputs"
    )
    has_dtype = panels_PJL.dtype == torch.bfloat16 or (is_int8 and scales is not None)
    require(has_dtype, "weights are bfloat16, or int8 with scales")
    require(num_outputs <= P * PANEL // (2 if gated else 1), f"the weights have fewer outputs than {num_outputs}")
    checked = checked_places(scales, P), checked_places(bias, P)
    addresses = (panels_PJL.data_ptr(), P, num_inputs, num_outputs, *checked)
    tensors = panels_PJL, scales, bias
    return BoundPanels(tensors, *sizes, gated, product.encode(), addresses, is_int8)


def checked_places(values: Tensor | None, num_panels: int) -> int | None:
    """Return the address of scales or of a bias. Raises RuntimeError unless they have one number in fp32 for each
    output of the panels (blocks of 32 outputs). None if `values` is None."""
    count = num_panels * PANEL
    return optional(values, torch.float32, count, f"scales and bias must be {count} of float32")


def depth(product: str, num_inputs: int) -> int:
    """Return the number of inputs that a panel (block of 32 outputs of a weight) stores for `num_inputs` inputs,
    including padding. `product` is a multiplication method of `baton.modeling.kernels.products`."""
    return num_inputs if product == WIDENED else -(-num_inputs // _TILE_INPUTS) * _TILE_INPUTS


def _deep(weight_MK: Tensor) -> Tensor:
    return F.pad(weight_MK, (0, -weight_MK.shape[1] % _TILE_INPUTS))
