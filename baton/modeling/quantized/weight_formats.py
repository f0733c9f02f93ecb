"""Reads from config.json how a checkpoint stores quantised weights, and refuses unknown formats.

`baton.modeling.checkpoints.stored_format` calls it when a model's configuration is read, before any weight is read.
"""

from collections.abc import Callable, Mapping

from baton.errors import ModelError
from baton.modeling.families.checkpoint import WeightFormat
from baton.modeling.families.fields import Fields
from baton.modeling.quantized.awq import AwqFormat
from baton.modeling.quantized.compressed_tensors import CompressedTensorsFormat
from baton.modeling.quantized.fp8 import Fp8Format
from baton.modeling.quantized.gptq import GptqFormat

_FORMATS: dict[str, Callable[[Fields], WeightFormat]] = {
    "compressed-tensors": CompressedTensorsFormat.read,
    "fp8": Fp8Format.read,
    "awq": AwqFormat.read,
    "gptq": GptqFormat.read,
}
"""Function that reads the format, by quant_method."""


def read_format(raw: object, source: str) -> WeightFormat:
    """Return the format that a `quantization_config` describes. `source` names the file and the field in errors.
    Raises ModelError, one line, for a format that cannot be read."""
    if not isinstance(raw, Mapping):
        raise ModelError(f"{source}: is not an object; correct the file, or choose another model")
    fields = Fields(raw, source)
    method = raw.get("quant_method")
    if not isinstance(method, str) or method not in _FORMATS:
        remedy = f"use the unquantised model, a GGUF file, or weights in {', '.join(_FORMATS)}"
        raise fields.error("quant_method", f"{method!r} is not supported", remedy)
    return _FORMATS[method](fields)
