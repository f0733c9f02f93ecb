"""Finds the quantisation format of the weights in a Hugging Face folder. Imports torch only for quantised weights.

`baton.modeling.checkpoints.weights` calls it when a model is loaded, `deploy` before it starts processes. Blocks on the
disk.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from baton.modeling.families.fields import read_json

if TYPE_CHECKING:
    from baton.modeling.families.checkpoint import WeightFormat

_CONFIG_FIELDS = ("quantization_config", "compression_config")
"""Fields of config.json that describe quantised weights. Early versions of compressed-tensors wrote the second."""
_SIDE_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files in which early tools described quantised weights instead of in config.json, and their quant_method."""
FORMAT_FILES = ("config.json", *_SIDE_FILES)
"""Files of a folder that may describe quantised weights."""


def load_format(folder: Path) -> "WeightFormat | None":
    """Return the quantisation format of the weights in `folder`, as its config.json states. None: they are plain.
    Raises ModelError for a format that cannot be read."""
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
    from baton.modeling.quantized.weight_formats import read_format  # imports torch

    return read_format(raw, source)
