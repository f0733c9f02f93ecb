"""Rotary position embedding (Su et al., 2021), with the scalings that configs ask for: a `PositionTable`.

Half-split form, as in Hugging Face: dimension i pairs with i + H / 2. Frequencies and angles are computed in fp32, as
in training and in transformers. Torch rotates in the activations' dtype, the kernel in C++ in fp32, rounded once.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from modeling.forward.model_config import ModelConfig
from modeling.kernels import native

_HEAD_DIM_STEP = 32
"""Multiple of the head dims that the kernel takes: two halves of whole registers."""


def inverse_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Return `(inv_freq [H/2] in fp32, factor on cos and sin)` for a model's RoPE and scaling."""
    assert config.rope_theta is not None, f"{config.model_type} does not rotate"
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
    inv_freq = 1.0 / (config.rope_theta ** (half / config.head_dim))
    scaling = config.rope_scaling
    if scaling.kind == "linear":
        return inv_freq / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(inv_freq, config), 1.0
    if scaling.kind == "yarn":
        return _yarn(inv_freq, config)
    assert scaling.kind == "default", scaling.kind
    return inv_freq, 1.0


def _llama3(inv_freq: Tensor, config: ModelConfig) -> Tensor:
    """Scale as Llama 3.1: long wavelengths are slowed by `factor`, short ones kept, those between interpolated."""
    scaling = config.rope_scaling
    turns = scaling.original_max_position * inv_freq / (2 * math.pi)
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return inv_freq * ((1 - smooth) / scaling.factor + smooth)


def _yarn(inv_freq: Tensor, config: ModelConfig) -> tuple[Tensor, float]:
    """Scale as YaRN (Peng et al., 2023): dimensions that turn often are kept, others interpolated."""
    scaling, head_dim, theta = config.rope_scaling, config.head_dim, config.rope_theta
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


@dataclass(frozen=True)
class Rotation:
    """Rotary factors of some tokens, broadcast over heads."""

    cos_T1H: Tensor
    sin_T1H: Tensor
    """Sines; negative in the first half, where the partner is subtracted."""
    in_place: bool = False
    """Whether heads are turned where they lie, by the kernel in C++ (modeling/kernels/layers/rotary.cpp)."""

    def enter(self, hidden_TD: Tensor) -> None:
        """Do nothing: RoPE does not change hidden states."""

    def turn(self, x_TNH: Tensor) -> Tensor:
        if not self.in_place:
            return apply_rotary(x_TNH, self)
        torch.ops.baton.turn_heads(x_TNH, self.cos_T1H, self.sin_T1H)
        return x_TNH


class RotaryTable:
    """Cosines and sines by position, made once for the model's whole context."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        inv_freq, factor = inverse_frequencies(config)
        angles_PF = torch.outer(torch.arange(config.max_position, dtype=torch.float32), inv_freq)
        cos_PF, sin_PF = angles_PF.cos() * factor, angles_PF.sin() * factor
        self._cos_P1H = torch.cat((cos_PF, cos_PF), dim=-1).to(device, dtype).unsqueeze(1)
        self._sin_P1H = torch.cat((-sin_PF, sin_PF), dim=-1).to(device, dtype).unsqueeze(1)
        self.in_place = has_native_turn(device, dtype, config.head_dim)
        """Whether heads are turned where they lie, by the kernel in C++."""

    def lookup(self, positions_T: Tensor) -> Rotation:
        """Return the factors of these positions, which must be below the model's context."""
        positions_T = positions_T.to(self._cos_P1H.device)
        return Rotation(self._cos_P1H[positions_T], self._sin_P1H[positions_T], self.in_place)


def has_native_turn(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether heads can be turned by the kernel in C++ here; builds it at the first call."""
    fits = device.type == "cpu" and dtype in (torch.bfloat16, torch.float32) and head_dim % _HEAD_DIM_STEP == 0
    return fits and native.load("rotary")


def apply_rotary(x_TNH: Tensor, rotation: Rotation) -> Tensor:
    """Rotate every head of every token by torch's own operations, in the activations' dtype."""
    low, high = x_TNH.chunk(2, dim=-1)
    return torch.addcmul(x_TNH * rotation.cos_T1H, torch.cat((high, low), dim=-1), rotation.sin_T1H)
