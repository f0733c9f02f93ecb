"""FP8 weights with scales. A weight has either one scale for each block, as DeepSeek stores it, or one scale in total.

`baton.modeling.quantized.weight_formats` reads this format when a model is loaded.

Legend: N outputs, K inputs of a weight.
"""

from dataclasses import dataclass

import torch

from baton.modeling.families.checkpoint import StoredTensors
from baton.modeling.families.fields import Fields
from baton.modeling.quantized.leftovers import ACTIVATIONS, KV_CACHE, unused_kind
from baton.modeling.quantized.scaled_weight import SCALE_TYPES, ScaledWeight, ScaleGrid, fp8_values
from baton.modeling.quantized.settings import read_block

_SCALE_NAMES = ("weight_scale_inv", "weight_scale")
"""Possible name endings of the tensor of scales. Weights are multiplied by the scales in both cases, although
`weight_scale_inv` suggests the inverse."""


@dataclass(frozen=True)
class Fp8Format:
    """Format of weights in e4m3. Each block of a weight, or the whole weight, is multiplied by one scale."""

    block: tuple[int, int] | None
    """Size of a block that shares one scale: (number of outputs, number of inputs). None: the whole weight is one
    block."""
    unused: tuple[str, ...] = (ACTIVATIONS,)

    @classmethod
    def read(cls, fields: Fields) -> "Fp8Format":
        """Read the format from the field `quantization_config` of config.json. Raises ModelError for a variant that is
        not supported."""
        fields.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        fields.choice("scale_fmt", ("float", "ue8m0"), "float")
        unused = (ACTIVATIONS,) if fields.raw.get("kv_cache_scheme") is None else (ACTIVATIONS, KV_CACHE)
        return cls(read_block(fields, "weight_block_size"), unused)

    @property
    def description(self) -> str:
        return "fp8, a scale a weight" if self.block is None else f"fp8, blocks of {self.block[0]} x {self.block[1]}"

    def weight(self, module: str, shape: tuple[int, ...], tensors: StoredTensors) -> ScaledWeight | None:
        name = next((f"{module}.{each}" for each in _SCALE_NAMES if tensors.has(f"{module}.{each}")), None)
        if name is None:
            return None
        codes_NK = tensors.stored(f"{module}.weight", {torch.float8_e4m3fn: [shape]})
        grid = ScaleGrid.of_whole(shape) if self.block is None else ScaleGrid.of_blocks(shape, self.block)
        scales = tensors.stored(name, grid.allowed(*SCALE_TYPES, torch.float8_e8m0fnu))
        return ScaledWeight(lambda start, stop: fp8_values(codes_NK[start:stop]), grid, scales, has_integers=False)

    def unused_kind(self, name: str) -> str | None:
        return unused_kind(name)
