"""Model in a local folder, and the properties that are read from the model's files: configuration, shape, and number of
bytes of the weights.

A model's config.json is read by the code of its family (`baton.modeling.checkpoints.weights`). This code imports torch,
which takes seconds. Therefore the result is cached on the disk. The name of the cache file is a hash of the files that
were read and of the code that read them, so a change of either one is always noticed. Functions block while they read
files.
"""

import hashlib
import json
import logging
import math
import re
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import baton.modeling
from baton.errors import ConfigError
from baton.modeling.checkpoints.stored_format import FORMAT_FILES
from baton.modeling.forward.model_config import ModelConfig
from baton.modeling.kernels import native
from baton.planning.model_shape import ModelShape
from baton.process.whole_files import whole
from baton.settings.base import from_json, to_json
from baton.settings.paths import cache_folder
from baton.types import DTYPE_BYTES
from generate_workers.engine.model_shape import model_shape

logger = logging.getLogger(__name__)

_READ_FILES = ("generation_config.json", *FORMAT_FILES)
"""Files of a model's folder that determine its configuration. If they change, a configuration that is cached on the
disk is not used any more."""
_READERS = ("checkpoints/*.py", "families/*.py", "quantized/*.py", "forward/model_config.py")
"""Source files of `baton.modeling` that parse a model's configuration. If they change, a configuration that is cached
on the disk is not used any more."""
_BLOCKS = {
    "blocks_q4_0": (32, 18),
    "blocks_q4_1": (32, 20),
    "blocks_q8_0": (32, 34),
    "blocks_q4_k": (256, 144),
    "blocks_q6_k": (256, 210),
}
"""Numbers of weights and of bytes of a block of a GGUF file, by the last part of the tensor's name
(`baton.modeling.quantized.gguf_blocks`)."""
_PACKED_NAMES = (".qweight", ".weight_packed")
"""Suffixes of the names of tensors that hold several quantised weights in one machine word."""
_QUANTIZE_FILES = ("quantize_config.json", "quant_config.json")
"""Names of the files in which older quantisation tools described how the weights are quantised."""
_REORDERED = re.compile(r'"(?:desc_act|actorder)"\s*:\s*(?:true|"group"|"dynamic")')
"""Pattern for the settings of weights whose inputs were reordered."""
_BITS = re.compile(r'"(?:bits|w_bit|num_bits)"\s*:\s*(4|8)\b')


@dataclass(frozen=True)
class ResolvedModel:
    """Model in a folder. Each of its files is read at most once, when its content is first needed."""

    folder: Path
    """Model folder in the Hugging Face format. `deploy.machine.model_folder` has found, downloaded or converted it."""

    @cached_property
    def config(self) -> ModelConfig:
        """Configuration of the model. Raises ModelError for a model that is not supported."""
        return model_config(self.folder)

    def shape(self, dtype: str) -> ModelShape:
        """Return the shape of the model. `dtype` is the type of its weights and KV. Raises ModelError for a model that
        is not supported."""
        return model_shape(self.config, DTYPE_BYTES[dtype])

    def keeps_codes(self, dtype: str, weights: str) -> bool:
        """Return True if CPU workers keep quantised weights as they are stored. `weights` is the form of weights, one
        of WEIGHT_FORMS. Raises ConfigError if a weight file is not a valid safetensors file."""
        has_kernels = weights == "stored" and dtype == "bfloat16" and native.chosen_set() is not None
        return has_kernels and self._sizes.num_packed > 0

    def weight_bytes(self, dtype: str, weights: str = "bfloat16") -> int:
        """Return the number of bytes of the weights in a worker's memory. `weights` is their form, one of WEIGHT_FORMS.
        Raises ConfigError if a weight file is not a valid safetensors file."""
        sizes = self._sizes
        if self.keeps_codes(dtype, weights):
            return sizes.packed_bytes + sizes.num_plain * DTYPE_BYTES[dtype]
        return (sizes.num_packed + sizes.num_plain) * DTYPE_BYTES[dtype]

    def bytes_per_weight(self, dtype: str, weights: str) -> float | None:
        """Return the mean number of bytes of a weight that CPU workers keep in the form `weights`. None: that of one
        number of the dtype. Raises ConfigError if a weight file is not a valid safetensors file."""
        if weights == "int8":
            return 1.0
        sizes = self._sizes
        num_weights = sizes.num_packed + sizes.num_plain
        return self.weight_bytes(dtype, weights) / num_weights if self.keeps_codes(dtype, weights) else None

    def token_bytes(self, dtype: str) -> int:
        """Return the number of bytes of a token's KV in all layers. `dtype` is the type of the KV. Raises ModelError
        for a model that is not supported."""
        return self.shape(dtype).num_layers * self.shape(dtype).kv_bytes

    def max_tokens(self, max_slot_tokens: int) -> int:
        """Return the maximum number of tokens of a request, prompt and output together: the smaller of
        `max_slot_tokens` and the number of positions that the model supports. Raises ModelError for a model that is not
        supported."""
        return min(max_slot_tokens, self.config.max_position)

    @cached_property
    def _sizes(self) -> "_Sizes":
        config = _quantization(self.folder / "config.json")
        found = [
            _sizes(path, _weights_a_word(config), reordered=_REORDERED.search(config) is not None)
            for path in self.folder.glob("*.safetensors")
        ]
        return _Sizes(*map(sum, zip(*found, strict=True))) if found else _Sizes(0, 0, 0)


class _Sizes(NamedTuple):
    """Numbers of a model's weights, and bytes of those whose codes workers can keep."""

    num_plain: int
    num_packed: int
    packed_bytes: int


def _sizes(path: Path, weights_a_word: int, *, reordered: bool) -> _Sizes:
    """Return the sizes of the tensors in a file. Scales count as plain weights. `reordered`: True if inputs were
    reordered, so that workers dequantise packed weights. Weights that workers dequantise for other reasons, such as
    parts of a layer in types that cannot be joined, are counted as if their codes were kept."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
    except (OSError, ValueError, struct.error) as error:
        raise ConfigError(
            f"model file {path} is not a safetensors file: download or convert the model again"
        ) from error
    num_plain = num_packed = packed_bytes = 0
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        size = math.prod(tensor["shape"])
        block = _BLOCKS.get(name.rpartition(".")[2])
        if block is not None:
            num_packed, packed_bytes = num_packed + size // block[1] * block[0], packed_bytes + size
        elif name.endswith(_PACKED_NAMES) and not reordered:
            num_packed, packed_bytes = num_packed + size * weights_a_word, packed_bytes + 4 * size
        elif name.endswith(_PACKED_NAMES):
            num_plain += size * weights_a_word
        elif tensor.get("dtype") == "I8" and name.endswith(".weight"):
            num_packed, packed_bytes = num_packed + size, packed_bytes + size
        else:
            num_plain += size
    return _Sizes(num_plain, num_packed, packed_bytes)


def _quantization(config: Path) -> str:
    """Return the text of the files that describe how weights are quantised: config.json, and an older tool's file
    (_QUANTIZE_FILES) next to it."""
    files = [path for path in (config, *map(config.with_name, _QUANTIZE_FILES)) if path.is_file()]
    return "".join(path.read_text(encoding="utf-8", errors="replace") for path in files)


def _weights_a_word(config: str) -> int:
    """Return the number of packed weights in a 32-bit word. It follows from the smallest number of bits in the text of
    the configuration. Return 8 if it does not specify the number of bits."""
    return 32 // min(map(int, _BITS.findall(config)), default=4)


def model_config(folder: Path) -> ModelConfig:
    """Return the configuration of the model in `folder`. It is read from the cache. If the cache does not contain
    it, it is parsed from the model's own files and added to the cache. Raises ModelError for a model that is not
    supported."""
    path = _kept_path(folder)
    try:
        if path.exists():
            return from_json(ModelConfig, path.read_bytes())
    except (OSError, ConfigError) as error:
        logger.warning("%s cannot be read (%s): the model's configuration is read again", path, error)
    from baton.modeling.checkpoints.weights import load_config  # imports torch

    config = load_config(folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as partial:
            partial.write_text(to_json(config))
    except OSError as error:
        logger.warning("%s cannot be written (%s): the next start reads the model's configuration again", path, error)
    return config


def _kept_path(folder: Path) -> Path:
    """Return the path of the cache file with the configuration of the model in `folder`. The file may not exist."""
    root = Path(baton.modeling.__path__[0])
    code = sorted(path for pattern in _READERS for path in root.glob(pattern))
    parts = [path.read_bytes() if path.is_file() else b"" for path in (*(folder / name for name in _READ_FILES), *code)]
    digest = hashlib.blake2b(b"\0".join(hashlib.blake2b(part).digest() for part in parts), digest_size=16)
    return cache_folder() / "configs" / f"{digest.hexdigest()}.json"
