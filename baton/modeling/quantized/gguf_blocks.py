"""Quantised tensors of GGUF files, as Baton's converter writes them: for each row of a weight, the blocks of the file,
as bytes. `baton.modeling.quantized.weight_formats` reads this format when a model is loaded.

The layouts of blocks are those of ggml (ggml-common.h): https://github.com/ggml-org/ggml.

Legend: N outputs and K inputs of a weight, B blocks of a row, F fields (scales and offsets).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from baton.modeling.families.checkpoint import QuantisedWeight, StoredTensors
from baton.modeling.families.fields import Fields
from baton.modeling.kernels.calls.codes import StoredWeight

METHOD = "gguf"
"""Value of `quant_method` in config.json."""


@dataclass(frozen=True)
class GgufFormat:
    """Weights in blocks of the types that the linear kernel reads. Others were dequantised by the converter."""

    types: tuple[str, ...]
    """Types of the blocks in the checkpoint, such as Q4_K, for messages."""
    unused: tuple[str, ...] = ()

    @classmethod
    def read(cls, fields: Fields) -> "GgufFormat":
        """Read the format from the field `quantization_config` of config.json. Raises ModelError for unknown types."""
        types = fields.raw.get("types")
        if not isinstance(types, list) or not all(isinstance(each, str) and each in _READERS for each in types):
            raise fields.error("types", f"{types!r} is not a list of {', '.join(_READERS)}", "convert the file again")
        return cls(tuple(types))

    @property
    def description(self) -> str:
        return f"gguf, {' and '.join(self.types)}"

    def weight(self, module: str, shape: tuple[int, ...], tensors: StoredTensors) -> "GgufWeight | None":
        for type_name in self.types:
            if tensors.has(name := blocks_name(module, type_name)):
                num_values, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
                if shape[1] % num_values:
                    remedy = "use the config.json that belongs to the weights"
                    raise tensors.error(name, f"has blocks of {num_values}, which do not divide {shape[1]}", remedy)
                stored = shape[0], shape[1] // num_values * num_bytes
                return GgufWeight(type_name, tensors.stored(name, {torch.uint8: [stored]}))
        return None

    def unused_kind(self, name: str) -> str | None:
        return None


@dataclass(frozen=True)
class GgufWeight(QuantisedWeight):
    """Quantised weight in blocks."""

    type_name: str
    bytes_NB: Tensor
    """Blocks of each row, uint8."""

    def rows(self, start: int, stop: int) -> Tensor:
        kind = GGMLQuantizationType[self.type_name]
        return torch.from_numpy(dequantize(self.bytes_NB[start:stop].numpy(), kind))

    def stored(self) -> StoredWeight:
        num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[self.type_name]][1]
        return _READERS[self.type_name](self.bytes_NB.view(len(self.bytes_NB), -1, num_bytes))


def is_kept(type_name: str) -> bool:
    """Return True if weights in blocks of this type are kept as they are by the converter."""
    return type_name in _READERS


def blocks_name(module: str, type_name: str) -> str:
    """Return the name of the tensor with the blocks of a module's weight."""
    return f"{module}.blocks_{type_name.lower()}"


def _q4_0(blocks: Tensor) -> StoredWeight:
    return StoredWeight(4, _nibbles(blocks[..., 2:]), _halves(blocks[..., :2]), zero=8)


def _q4_1(blocks: Tensor) -> StoredWeight:
    return StoredWeight(4, _nibbles(blocks[..., 4:]), _halves(blocks[..., :4]))


def _q8_0(blocks: Tensor) -> StoredWeight:
    return StoredWeight(8, blocks[..., 2:].contiguous().view(torch.int8).flatten(1), _halves(blocks[..., :2]))


def _q4_k(blocks: Tensor) -> StoredWeight:
    scales_NBF = _halves(blocks[..., :4]) * torch.tensor([1, -1], dtype=torch.float16)  # minima are subtracted
    low, middle, high = blocks[..., 4:16].reshape(*blocks.shape[:2], 3, 4).unbind(-2)
    scales = torch.cat((low & 63, high & 15 | low >> 6 << 4), -1)
    minima = torch.cat((middle & 63, high >> 4 | middle >> 6 << 4), -1)
    factors_NSF = torch.stack((scales, minima), -1).flatten(1, 2).view(torch.int8)
    return StoredWeight(4, _nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)), scales_NBF, factors_NSF)


def _q6_k(blocks: Tensor) -> StoredWeight:
    low = _nibbles(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64)).view(*blocks.shape[:2], 2, 4, 32)
    upper = blocks[..., 128:192].view(*blocks.shape[:2], 2, 1, 32)
    high = upper >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1) & 3
    factors_NSF = blocks[..., 192:208].contiguous().view(torch.int8).flatten(1).unsqueeze(-1)
    return StoredWeight(6, (low | high << 4).flatten(1), _halves(blocks[..., 208:]), factors_NSF, zero=32)


_READERS: dict[str, Callable[[Tensor], StoredWeight]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
"""Functions that read blocks `[N, B, bytes]`, by the type's name."""


def _halves(in_bytes: Tensor) -> Tensor:
    """Return numbers of fp16, `[N, B, F]`."""
    return in_bytes.contiguous().view(torch.float16)


def _nibbles(in_bytes: Tensor) -> Tensor:
    """Return codes of 4 bits, one row for each output. In each run of bytes, the lower halves of the bytes precede the
    upper halves."""
    return torch.stack((in_bytes & 15, in_bytes >> 4), -2).flatten(1)
