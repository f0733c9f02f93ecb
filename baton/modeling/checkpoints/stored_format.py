"""Detects the quantisation format of the weights in a Hugging Face folder. Imports torch only if the weights are
quantised.

`baton.modeling.checkpoints.weights` calls this module when it loads a model, and `deploy` calls it before it starts
processes. Blocks on disk reads.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from baton.modeling.families.fields import read_json

if TYPE_CHECKING:
    from baton.modeling.families.checkpoint import WeightFormat

_CONFIG_FIELDS = ("quantization_config", "compression_config")
"""Fields of config.json that describe quantised weights. Early versions of compressed-tensors wrote
`compression_config`."""
_SIDE_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files in which early quantisation tools described the weights instead of in config.json. Each file name is mapped to
its quant_method."""
FORMAT_FILES = ("config.json", *_SIDE_FILES)
"""Files of a model folder that may describe the quantisation of the weights."""


def load_format(folder: Path) -> "WeightFormat | None":
    """Return the quantisation format of the weights in `folder`, as its config files declare it. None: the weights are
    not quantised. Raises ModelError if the format is not supported."""
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
