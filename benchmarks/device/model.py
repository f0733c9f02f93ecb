"""Models with the shapes of real models and with random weights, created on the device that they run on.

In the dimension suffixes of variable names, N is the number of outputs and K the number of inputs of a weight matrix.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.modeling.device.port import Device
from baton.modeling.forward.attention import Kernel
from baton.modeling.forward.decoder import Decoder, DecoderWeights
from baton.modeling.forward.layers import GatedMlp, Layer, Sequential
from baton.modeling.forward.linear import make_linear
from baton.modeling.forward.model_config import ModelConfig
from baton.modeling.forward.norms import RmsNorm, unchanged
from baton.modeling.forward.rope import RotaryTable
from baton.modeling.kv.buffers import TORCH_DTYPES

HEAD_DIM = 128


@dataclass(frozen=True)
class Shape:
    """Shape of a model of the Llama family."""

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    head_dim: int = HEAD_DIM

    @property
    def hidden_size(self) -> int:
        """Return the number of channels of a token: num_heads * head_dim."""
        return self.num_heads * self.head_dim

    def config(self, max_position: int) -> ModelConfig:
        """Return the model's configuration, for a context of `max_position` tokens."""
        return ModelConfig(
            model_type="llama",
            vocab_size=self.vocab_size,
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_position=max_position,
            tie_embeddings=False,
            rope_theta=10000.0,
            windows=(None,) * self.num_layers,
        )

    @property
    def num_weights(self) -> int:
        """Return the number of weights of all layers. The embedding and the output head are not counted."""
        attention = self.hidden_size * (2 * self.hidden_size + 2 * self.num_kv_heads * self.head_dim)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    def prefill_flops(self, num_tokens: int) -> float:
        """Return the number of floating-point operations to prefill `num_tokens` tokens: matrix products and causal
        attention for all tokens, and the output head for one token."""
        attention = 2 * self.num_layers * self.hidden_size * num_tokens**2
        return 2.0 * self.num_weights * num_tokens + attention + 2.0 * self.hidden_size * self.vocab_size


SEVEN_B = Shape("7b", 32, 32, 8, 14336, 32000)
"""Shape of Mistral 7B."""
ONE_B = Shape("7b-8-layers", 8, 32, 8, 14336, 32000)
"""Shape of Mistral 7B with 8 instead of 32 layers. Used when each of several processes needs its own copy of the
model."""
TINY = Shape("tiny", 4, 4, 2, 256, 512, head_dim=32)
"""Shape for a smoke test."""


def random_model(
    shape: Shape, device: Device, *, max_position: int, dtype: str = "bfloat16", kernel: Kernel | None = None
) -> Decoder:
    """Return a model with random weights. Two calls with the same shape and the same kind of device return equal
    weights."""
    config, where = shape.config(max_position), device.torch_device
    return Decoder(config, _weights(config, where, dtype), kernel, device=device)


def _weights(config: ModelConfig, where: torch.device, dtype: str) -> DecoderWeights:
    generator = torch.Generator(where).manual_seed(0)
    hidden, inner, width = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim

    def random(num_outputs: int, num_inputs: int) -> Tensor:
        weight_NK = torch.empty(num_outputs, num_inputs, dtype=TORCH_DTYPES[dtype], device=where)
        return weight_NK.normal_(0, 1 / math.sqrt(num_inputs), generator=generator)

    def norm() -> RmsNorm:
        return RmsNorm(torch.ones(hidden, dtype=TORCH_DTYPES[dtype], device=where), 1e-5)

    def layer() -> Layer:
        mlp = GatedMlp(make_linear(random(2 * inner, hidden), gated=True), make_linear(random(hidden, inner)))
        qkv = make_linear(random(width + 2 * config.num_kv_heads * config.head_dim, hidden))
        return Layer(norm(), qkv, unchanged, Sequential(make_linear(random(hidden, width)), norm(), mlp))

    return DecoderWeights(
        device=where,
        dtype=TORCH_DTYPES[dtype],
        embedding=make_linear(random(config.vocab_size, hidden)),
        positions=RotaryTable(config, where, TORCH_DTYPES[dtype]),
        layers=tuple(layer() for _ in range(config.num_layers)),
        final_norm=norm(),
        head=make_linear(random(config.vocab_size, hidden), has_many_rows=False),
        fingerprint=f"random-{config.num_layers}-{hidden}-{config.vocab_size}-{dtype}",
    )
