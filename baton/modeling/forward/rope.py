"""Rotary position embedding (RoPE; Su et al., 2021), with the scalings of Hugging Face configs. Implements
`PositionTable`.

As in Hugging Face, dimension i of a head is paired with dimension i + H / 2, where H is the head dim. Frequencies and
angles are computed in fp32, as in training and in transformers. Torch's operations rotate in the dtype of the
activations. The C++ kernel rotates in fp32 and rounds once.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.modeling.device.sending import to_device
from baton.modeling.forward.model_config import ModelConfig, RopeScaling
from baton.modeling.kernels import native
from baton.modeling.kernels.triton.launch import compiles_for
from baton.modeling.kernels.triton.pointwise import turn_heads

_HEAD_DIM_STEP = 32
"""The C++ kernel requires a head dim that is a multiple of this number, because each half of a head must fill whole
registers."""


def inverse_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Return `(inv_freq, factor)` for a model's RoPE and its scaling. `inv_freq` contains the inverse frequencies
    `[R/2]` in fp32, where R is the number of rotated dimensions. Cosines and sines are multiplied by `factor`."""
    assert config.rope_theta is not None, f"{config.model_type} does not rotate"
    rotary_dim = config.rotary_dim or config.head_dim
    half = torch.arange(0, rotary_dim, 2, dtype=torch.float32)
    inv_freq = 1.0 / (config.rope_theta ** (half / rotary_dim))
    scaling = config.rope_scaling
    if scaling.kind == "linear":
        return inv_freq / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(inv_freq, config), 1.0
    if scaling.kind == "yarn":
        return _yarn(inv_freq, config)
    if scaling.kind == "longrope":
        return _longrope(inv_freq, scaling)
    assert scaling.kind == "default", scaling.kind
    return inv_freq, 1.0


def _llama3(inv_freq: Tensor, config: ModelConfig) -> Tensor:
    """Scale like Llama 3.1: divide low frequencies by `factor`, keep high ones, and interpolate between them."""
    scaling = config.rope_scaling
    turns = scaling.original_max_position * inv_freq / (2 * math.pi)
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return inv_freq * ((1 - smooth) / scaling.factor + smooth)


def _yarn(inv_freq: Tensor, config: ModelConfig) -> tuple[Tensor, float]:
    """Scale like YaRN (Peng et al., 2023): keep dimensions of high frequency, and interpolate the others."""
    scaling, theta = config.rope_scaling, config.rope_theta
    head_dim = config.rotary_dim or config.head_dim
    assert theta is not None

    def dimension(turns: float) -> float:
        context = scaling.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(context) / (2 * math.log(theta))

    low = max(math.floor(dimension(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension(scaling.beta_slow)), head_dim - 1)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    factor = scaling.attention_factor
    if factor is None:
        factor = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return inv_freq * (1 - ramp) + inv_freq / scaling.factor * ramp, factor


def _longrope(inv_freq: Tensor, scaling: RopeScaling) -> tuple[Tensor, float]:
    """Scale like LongRoPE (Ding et al., 2024): multiply each wavelength by its own factor, which was
    found by a search."""
    factor = scaling.attention_factor
    if factor is None:
        log = math.log(scaling.factor) / math.log(scaling.original_max_position) if scaling.factor > 1 else 0.0
        factor = math.sqrt(1 + log)
    return inv_freq / torch.tensor(scaling.factors), factor


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of the tokens of one forward pass. They are broadcast over the heads."""

    cos_T1H: Tensor
    sin_T1H: Tensor
    """Sines, negated in the first half of each head. In this half, the rotation subtracts the other dimension of the
    pair."""
    in_place: bool = False
    """True if a kernel rotates heads in place: on a CPU the C++ kernel (baton/modeling/kernels/layers/rotary.cpp), on a
    GPU the Triton kernel. False if torch's operations compute rotated copies of the heads."""

    def enter(self, hidden_TD: Tensor) -> None:
        """Do nothing: RoPE does not change hidden states."""

    def turn(self, x_TNH: Tensor, layer: int) -> Tensor:
        """Return `x_TNH` with all heads rotated: the same tensor if `in_place` is set, otherwise a copy. The cosines
        and sines are the same in every layer."""
        if not self.in_place:
            return apply_rotary(x_TNH, self)
        turn = turn_heads if compiles_for(x_TNH.device, x_TNH.dtype) else native.operators().turn_heads
        turn(x_TNH, self.cos_T1H, self.sin_T1H)
        return x_TNH


class RotaryTable:
    """Cosines and sines by position, computed once for the model's whole context."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        inv_freq, factor = inverse_frequencies(config)
        angles_PF = torch.outer(torch.arange(config.max_position, dtype=torch.float32), inv_freq)
        still = config.head_dim // 2 - len(inv_freq)  # pairs of dimensions that are not rotated: cosine 1 and sine 0
        cos_PF, sin_PF = (
            F.pad(angles_PF.cos() * factor, (0, still), value=1.0),
            F.pad(angles_PF.sin() * factor, (0, still)),
        )
        self._cos_P1H = torch.cat((cos_PF, cos_PF), dim=-1).to(device, dtype).unsqueeze(1)
        self._sin_P1H = torch.cat((-sin_PF, sin_PF), dim=-1).to(device, dtype).unsqueeze(1)
        self.in_place = has_native_turn(device, dtype, config.head_dim) or compiles_for(device, dtype)
        """True if a C++ or Triton kernel rotates heads in place. False if torch's operations compute rotated copies."""

    def lookup(self, positions_T: Tensor) -> Rotation:
        """Return the cosines and sines of these positions. Each position must be below the length of the model's
        context."""
        positions_T = to_device(positions_T, self._cos_P1H.device)
        return Rotation(self._cos_P1H[positions_T], self._sin_P1H[positions_T], self.in_place)


@dataclass(frozen=True)
class LayeredRotation:
    """Cosines and sines of the tokens of one forward pass, for models in which layers have different RoPE settings."""

    rotations: tuple[Rotation, ...]
    by_layer: tuple[int, ...]
    """Index in `rotations` of the entry that each layer uses."""

    def enter(self, hidden_TD: Tensor) -> None:
        """Do nothing: RoPE does not change hidden states."""

    def turn(self, x_TNH: Tensor, layer: int) -> Tensor:
        """Return `x_TNH` with all heads rotated by the cosines and sines of `layer`. The result may be `x_TNH` itself,
        changed in place."""
        return self.rotations[self.by_layer[layer]].turn(x_TNH, layer)


@dataclass(frozen=True)
class LayeredRotaryTable:
    """Several tables of cosines and sines, for models in which layers have different RoPE settings (Gemma 3). Each
    layer uses one table."""

    tables: tuple[RotaryTable, ...]
    by_layer: tuple[int, ...]
    """Index in `tables` of the table that each layer uses."""

    def lookup(self, positions_T: Tensor) -> LayeredRotation:
        """Return the cosines and sines of these positions from all tables. Each position must be below the length of
        the model's context."""
        return LayeredRotation(tuple(table.lookup(positions_T) for table in self.tables), self.by_layer)


def has_native_turn(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return True if the C++ kernel is available and can rotate heads on this device, with this dtype and head dim."""
    fits = device.type == "cpu" and dtype in (torch.bfloat16, torch.float32) and head_dim % _HEAD_DIM_STEP == 0
    return fits and native.load()


def apply_rotary(x_TNH: Tensor, rotation: Rotation) -> Tensor:
    """Return a copy of `x_TNH` in which every head of every token is rotated. Uses torch's operations, in the dtype of
    the activations."""
    low, high = x_TNH.chunk(2, dim=-1)
    return torch.addcmul(x_TNH * rotation.cos_T1H, torch.cat((high, low), dim=-1), rotation.sin_T1H)
