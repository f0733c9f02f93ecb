"""Linear layers, fused with the norm before them and with the gate or the residual sum after them.

There is one interface, which `layers` uses, with three implementations:

- `TorchLinear` uses torch, on any device.
- `PanelLinear` uses the C++ kernel (baton/modeling/kernels/linear/linear.cpp), for bf16 on CPUs. Norm, gate and
  residual are part of one pass over the weights. The result of a token does not depend on the other tokens of the
  batch, bit for bit, except for stored codes, for which small calls are computed in another way.
- `LinearByRows` uses the C++ kernel for few rows (tokens) and torch for many rows.
  `baton.modeling.kernels.choosing` measures the number of rows from which torch is faster.

Shape letters: T tokens, K inputs, N outputs, I = N / 2 gated outputs, P panels of 32 rows of the weight, J >= K inputs
of a panel.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.errors import ModelError
from baton.modeling.forward.norms import RmsNorm, Transform, unchanged
from baton.modeling.kernels import native
from baton.modeling.kernels.calls.codes import PackedCodes, StoredWeight, bind_codes, pack_codes
from baton.modeling.kernels.calls.panels import HALF, PANEL, BoundPanels, bind_panels, pack_panels, unpack_rows
from baton.modeling.kernels.huge_pages import WEIGHTS
from baton.modeling.kernels.process_kernels import KERNELS
from baton.modeling.kernels.triton.launch import compiles_for
from baton.modeling.kernels.triton.pointwise import gate


@runtime_checkable
class Linear(Protocol):
    """Linear layer with weight `[N, K]` and an optional bias `[N]`. If the layer is gated, its result is silu(first
    half of the outputs) times the second half (SwiGLU; Shazeer, 2020)."""

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes of weight and bias as they are stored."""

    def __call__(self, x_TK: Tensor, norm: Transform = unchanged, residual_TN: Tensor | None = None) -> Tensor:
        """Return `norm(x) W^T + b`, `[T, N]`. If the layer is gated, the gate is applied and the result is `[T, I]`.
        The residual is added if it is given.

        The result may be written into the residual's memory, so the caller must not read the residual afterwards.
        """

    def weight(self) -> Tensor:
        """Return the weight `[N, K]` with the values that the layer uses, for example after rounding to int8. The
        result may be a copy. Its dtype may be wider than the dtype of the loaded weight."""

    def bias(self) -> Tensor | None:
        """Return the bias `[N]` as it was loaded. None if the layer has no bias."""

    def rows(self, indices_T: Tensor) -> Tensor:
        """Return rows of the weight by their indices, `[T, K]`. Used if the layer is an embedding."""


@dataclass(frozen=True)
class TorchLinear:
    """Linear layer that is computed with torch's operations."""

    weight_NK: Tensor
    bias_N: Tensor | None = None
    gated: bool = False

    @property
    def num_bytes(self) -> int:
        return _num_bytes(self.weight_NK, self.bias_N)

    def __call__(self, x_TK: Tensor, norm: Transform = unchanged, residual_TN: Tensor | None = None) -> Tensor:
        is_plain = residual_TN is not None and self.bias_N is None and not self.gated
        if residual_TN is not None and is_plain and compiles_for(residual_TN.device, residual_TN.dtype):
            return residual_TN.addmm_(norm(x_TK), self.weight_NK.t())  # the product adds it, without a separate pass
        out_TN = F.linear(norm(x_TK), self.weight_NK, self.bias_N)
        if self.gated:
            out_TN = _gated(out_TN)
        return out_TN if residual_TN is None else residual_TN + out_TN

    def weight(self) -> Tensor:
        return self.weight_NK

    def bias(self) -> Tensor | None:
        return self.bias_N

    def rows(self, indices_T: Tensor) -> Tensor:
        return F.embedding(indices_T, self.weight_NK)


class PanelLinear:
    """Linear layer that is computed by the C++ kernel, which must have been loaded. The weight is stored only in panels
    (blocks of 32 rows that the kernel reads sequentially).

    A `StoredWeight` keeps its codes, and calls multiply by them. If the multiplication method has operands in bf16,
    calls with many rows (the limits are in linear/weights.h) multiply by dequantised weights, and their results equal,
    bit for bit, those of the same weight in bf16. Other results are those of exact weights.

    If `int8` is set, a weight in bf16 is rounded to int8 with one scale per row, which halves the number of bytes to
    read.
    """

    def __init__(
        self,
        weight: Tensor | StoredWeight,
        bias_N: Tensor | None = None,
        gated: bool = False,
        *,
        int8: bool = False,
        product: str | None = None,
        instruction_set: str = native.NATIVE,
    ) -> None:
        """Pack the weight into panels (blocks of 32 rows). `product` is the multiplication method, one of
        `baton.modeling.kernels.products`. None: the method that was chosen for this process."""
        num_rows, self._num_inputs = weight.shape
        self.product = product or KERNELS.choice.panels
        self._instruction_set = instruction_set
        self._gated = gated
        self._num_outputs = num_rows // 2 if gated else num_rows
        self._order_N = _gated_order(self._num_outputs) if gated else torch.arange(num_rows)
        self._num_places = -(-(int(self._order_N[-1]) + 1) // PANEL) * PANEL
        self._scales = None
        self._bias = None if bias_N is None else self._placed(bias_N.float())
        if int8 and isinstance(weight, Tensor):
            weight, scale_N = _rounded(weight)
            self._scales = self._placed(scale_N)
        self._packed: PackedCodes | Tensor = (
            pack_codes(weight.with_rows(self._placed), WEIGHTS.copy)
            if isinstance(weight, StoredWeight)
            else WEIGHTS.copy(pack_panels(self._placed(weight), self.product))
        )
        self._bind()

    def _bind(self) -> None:
        """Bind the packed weight to the kernel, by the addresses of its tensors."""
        self._operators = native.operators(self._instruction_set)
        sizes, gated = (self._num_inputs, self._num_outputs), self._gated
        if isinstance(self._packed, PackedCodes):
            self._bound = bind_codes(self._packed, sizes, self._bias, gated=gated, product=self.product)
        else:
            weights = self._packed, self._scales
            self._bound = bind_panels(weights, sizes, self._bias, gated=gated, product=self.product)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_operators", "_bound")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._bind()

    @property
    def num_bytes(self) -> int:
        return _num_bytes(*self._bound.tensors)

    def __call__(self, x_TK: Tensor, norm: Transform = unchanged, residual_TN: Tensor | None = None) -> Tensor:
        gain_K, eps = _gain(norm)
        if gain_K is None:
            x_TK = norm(x_TK)
        return self._operators.linear(x_TK, self._bound, gain_K, eps, residual_TN)

    def described(self, norm: Transform) -> tuple[BoundPanels, Tensor | None, float]:
        """Return this layer's weights, and the gain and epsilon of `norm`, as arguments of `DecodeLayers.add`. `norm`
        must be an RmsNorm, or `unchanged`, for which the gain is None."""
        gain_K, eps = _gain(norm)
        assert gain_K is not None or norm is unchanged, norm
        return self._bound, gain_K, eps

    def weight(self) -> Tensor:
        return self._rows(torch.arange(len(self._order_N)))

    def bias(self) -> Tensor | None:
        return None if self._bias is None else self._bias[self._order_N].bfloat16()

    def rows(self, indices_T: Tensor) -> Tensor:
        return self._rows(indices_T).bfloat16()

    def _rows(self, indices_T: Tensor) -> Tensor:
        at_T = self._order_N[indices_T]
        if isinstance(self._packed, PackedCodes):
            return self._operators.dequantised_rows(self._bound, at_T)
        kept_TK = unpack_rows(self._packed, at_T, self._num_inputs, self.product)
        return kept_TK if self._scales is None else kept_TK * self._scales[at_T].unsqueeze(-1)

    def _placed(self, of_rows: Tensor) -> Tensor:
        """Return the values of the weight's rows in the order of the panels, with zeros where a panel has no row."""
        placed = torch.zeros(self._num_places, *of_rows.shape[1:], dtype=of_rows.dtype)
        placed[self._order_N] = of_rows
        return placed


@dataclass(frozen=True)
class LinearByRows:
    """Linear layer that stores its weight twice: for calls with few tokens in panels (blocks of 32 rows that the C++
    kernel reads sequentially), and for calls with many tokens in torch's layout."""

    few: PanelLinear
    many: TorchLinear
    many_rows: int
    """Minimum number of tokens (rows of the input) for which `many` is used. Calls with fewer tokens use `few`."""

    @property
    def num_bytes(self) -> int:
        return self.few.num_bytes + self.many.num_bytes

    def __call__(self, x_TK: Tensor, norm: Transform = unchanged, residual_TN: Tensor | None = None) -> Tensor:
        linear = self.few if len(x_TK) < self.many_rows else self.many
        return linear(x_TK, norm, residual_TN)

    def weight(self) -> Tensor:
        return self.many.weight()

    def bias(self) -> Tensor | None:
        return self.many.bias()

    def rows(self, indices_T: Tensor) -> Tensor:
        return self.many.rows(indices_T)


def _gated(out_TN: Tensor) -> Tensor:
    if compiles_for(out_TN.device, out_TN.dtype):
        return gate(out_TN)
    gate_TI, up_TI = out_TN.chunk(2, dim=-1)
    return F.silu(gate_TI).mul_(up_TI)


def _gain(norm: Transform) -> tuple[Tensor | None, float]:
    """Return the gain `[K]` and epsilon of a norm that the kernel computes. The gain is None for any other norm."""
    return (norm.gain_D, norm.eps) if isinstance(norm, RmsNorm) else (None, 0.0)


def _num_bytes(*tensors: Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _rounded(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return `(int8 [N, K], scales [N] in fp32)`. Rounding is to nearest and symmetric, so that the largest weight of
    each row becomes 127 in magnitude."""
    wide_NK = weight_NK.float()
    scale_N = wide_NK.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / 127
    return (wide_NK / scale_N.unsqueeze(1)).round().to(torch.int8), scale_N


def _gated_order(num_outputs: int) -> Tensor:
    """Return the indices of the gate rows, then those of the up rows, so that a panel holds 16 gate rows and their up
    rows."""
    at_I = torch.arange(num_outputs)
    gates_I = at_I // HALF * PANEL + at_I % HALF
    return torch.cat((gates_I, gates_I + HALF))


def has_panel_linear() -> bool:
    """Return True if `PanelLinear` computes steps with few tokens in this process. The first call may measure
    kernels."""
    return KERNELS.choice.torch_rows != 1 and native.load()


def make_linear(
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    gated: bool = False,
    int8: bool = False,
    has_many_rows: bool = True,
) -> Linear:
    """Return the fastest linear layer on this machine for the weight's device and dtype.

    `int8`: True to round the weight to int8. Raises ModelError if int8 is not supported. `has_many_rows`: True if the
    layer will also run on many tokens at once. False: the layer will run on only few tokens at once, and its weight is
    stored only once.
    """
    on_cpu = weight_NK.device.type == "cpu" and weight_NK.dtype == torch.bfloat16
    if int8:
        if not on_cpu or not native.load():
            remedy = "choose other weights, or use dtype bfloat16 on device cpu, with a C++ compiler"
            raise ModelError(f"weights int8 are not supported for {weight_NK.dtype} on {weight_NK.device}; {remedy}")
        return PanelLinear(weight_NK, bias_N, gated, int8=True)
    torchs = TorchLinear(weight_NK, bias_N, gated)
    if not on_cpu or not has_panel_linear():
        return torchs
    ours, many_rows = PanelLinear(weight_NK, bias_N, gated), KERNELS.choice.torch_rows
    return LinearByRows(ours, torchs, many_rows) if has_many_rows and many_rows is not None else ours
