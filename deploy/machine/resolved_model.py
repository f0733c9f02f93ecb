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

import baton.modeling
from baton.errors import ConfigError
from baton.modeling.checkpoints.stored_format import FORMAT_FILES
from baton.modeling.forward.model_config import ModelConfig
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
_PACKED_NAMES = (".qweight", ".weight_packed")
"""Suffixes of the names of tensors that hold several quantised weights in one machine word."""
_QUANTIZE_FILES = ("quantize_config.json", "quant_config.json")
"""Names of the files in which older quantisation tools described how the weights are quantised."""
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

    def weight_bytes(self, dtype: str) -> int:
        """Return the number of bytes of the weights after they are loaded as `dtype`. Raises ConfigError if a weight
        file is not a valid safetensors file."""
        return self._num_weights * DTYPE_BYTES[dtype]

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
