"""A model in a folder that was found, and the facts that its files contain: configuration, shape, and bytes of the
weights.

Blocks on the disk.
"""

import json
import math
import re
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from baton.errors import ConfigError
from baton.modeling.forward.model_config import ModelConfig
from baton.planning.model_shape import ModelShape
from baton.types import DTYPE_BYTES
from deploy.machine.kept_config import model_config
from generate_workers.engine.model_shape import model_shape

_PACKED_NAMES = (".qweight", ".weight_packed")
"""Suffixes of the names of tensors that hold several weights in one word."""
_QUANTIZE_FILES = ("quantize_config.json", "quant_config.json")
"""Files in which older tools described quantised weights."""
_BITS = re.compile(r'"(?:bits|w_bit|num_bits)"\s*:\s*(4|8)\b')


@dataclass(frozen=True)
class ResolvedModel:
    """A model in a folder. Each file is read at most once, when its content is first needed."""

    folder: Path
    """Hugging Face folder, found, downloaded or converted (`deploy.machine.model_folder`)."""

    @cached_property
    def config(self) -> ModelConfig:
        """Configuration of the model. Raises ModelError for a model that is not supported."""
        return model_config(self.folder)

    def shape(self, dtype: str) -> ModelShape:
        """Return the shape of the model with weights and KV of that dtype. Raises ModelError."""
        return model_shape(self.config, DTYPE_BYTES[dtype])

    def weight_bytes(self, dtype: str) -> int:
        """Return the number of bytes of the weights when they are loaded as `dtype`. Raises ConfigError for a file that
        is not a safetensors file."""
        return self._num_weights * DTYPE_BYTES[dtype]

    def max_tokens(self, max_slot_tokens: int) -> int:
        """Return the number of tokens, prompt and output, that a request may have: limited by a slot's size and the
        model's number of positions. Raises ModelError."""
        return min(max_slot_tokens, self.config.max_position)

    @cached_property
    def _num_weights(self) -> int:
        weights_a_word = _weights_a_word(self.folder / "config.json")
        return sum(_num_weights(path, weights_a_word) for path in self.folder.glob("*.safetensors"))


def _num_weights(path: Path, weights_a_word: int) -> int:
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
    except (OSError, ValueError, struct.error) as error:
        raise ConfigError(
            f"model file {path} is not a safetensors file: download or convert the model again"
        ) from error
    return sum(
        math.prod(tensor["shape"]) * (weights_a_word if name.endswith(_PACKED_NAMES) else 1)
        for name, tensor in header.items()
        if name != "__metadata__"
    )


def _weights_a_word(config: Path) -> int:
    """Return the number of packed weights in a 32-bit word. It follows from the smallest number of bits in config.json
    or in an older tool's file (_QUANTIZE_FILES) next to it. Return 8 if the files do not specify the number of bits."""
    files = [path for path in (config, *map(config.with_name, _QUANTIZE_FILES)) if path.is_file()]
    named = [int(bits) for path in files for bits in _BITS.findall(path.read_text(encoding="utf-8", errors="replace"))]
    return 32 // min(named, default=4)
