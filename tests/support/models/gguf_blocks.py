"""Random weights in the block formats of GGUF, and their values as the gguf package computes them."""

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

TYPES = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")
_SCALES = {"Q4_0": (0, 1, 8), "Q4_1": (0, 2, 8), "Q8_0": (0, 1, 64), "Q4_K": (0, 2, 256), "Q6_K": (208, 1, 1024)}
"""Offset in bytes of a block's scales in fp16, their number, and the typical size of a weight with a scale of 1."""


def random_blocks(
    type_name: str, num_outputs: int, num_inputs: int, seed: int = 0, *, size: float | None = None
) -> Tensor:
    """Return blocks with random codes, uint8 `[N, bytes of a row]`. Scales in fp16 have random signs. Weights have
    about the given size. None: the sizes of groups differ a lot."""
    random = np.random.default_rng(seed)
    num_values, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    blocks = random.integers(0, 256, (num_outputs, num_inputs // num_values, num_bytes), dtype=np.uint8)
    start, count, of_one = _SCALES[type_name]
    sizes = 2.0 ** random.integers(-20, -3, (*blocks.shape[:2], 1)) if size is None else size / of_one
    scales = sizes * random.uniform(-2, 2, (*blocks.shape[:2], count))
    blocks[..., start : start + 2 * count] = scales.astype(np.float16).view(np.uint8)
    return torch.from_numpy(blocks.reshape(num_outputs, -1))


def values_of(type_name: str, blocks: Tensor) -> Tensor:
    """Return the values in fp32, `[N, K]`."""
    return torch.from_numpy(dequantize(blocks.numpy(), GGMLQuantizationType[type_name]))
