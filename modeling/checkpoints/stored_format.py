"""Finds out from a Hugging Face folder how its weights are quantised. Imports torch only for weights that are.

`modeling.checkpoints.weights` calls it when a model is loaded, `deploy` before anything is started. Blocks on the disk.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from modeling.families.fields import read_json

if TYPE_CHECKING:
    from modeling.families.checkpoint import WeightFormat

_CONFIG_FIELDS = ("quantization_config", "compression_config")
"""Fields of config.json that describe quantised weights; early versions of compressed-tensors wrote the second."""
_SIDE_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files in which early tools described quantised weights, where config.json does not, and their quant_method."""
FORMAT_FILES = ("config.json", *_SIDE_FILES)
"""Files of a folder that may describe quantised weights."""


def load_format(folder: Path) -> "WeightFormat | None":
    """Return how the weights in `folder` are quantised, as its config.json says; None if they are plain. Raises
    ModelError for a format that cannot be read."""
    path = folder / "config.json"
    raw = read_json(path)
    for field in _CONFIG_FIELDS:
        if raw.get(field):
            return _read(raw[field], f"{path}: {field}")
    for name, method in _SIDE_FILES.items():
        if (folder / name).is_file():
            return _read({"quant_method": method, **read_json(folder / name)}, str(folder / name))
    return None


def _read(raw: object, source: str) -> "WeightFormat":
    from modeling.quantized.reading import read_format  # imports torch

    return read_format(raw, source)
