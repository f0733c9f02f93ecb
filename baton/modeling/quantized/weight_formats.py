"""Reads the format of a checkpoint's quantised weights from config.json. Unknown formats are rejected.

`baton.modeling.checkpoints.stored_format` calls this module when it reads a model's configuration, before any weight is
read.
"""

from collections.abc import Callable, Mapping

from baton.errors import ModelError
from baton.modeling.families.checkpoint import WeightFormat
from baton.modeling.families.fields import Fields
from baton.modeling.quantized.awq import AwqFormat
from baton.modeling.quantized.compressed_tensors import CompressedTensorsFormat
from baton.modeling.quantized.fp8 import Fp8Format
from baton.modeling.quantized.gguf_blocks import METHOD, GgufFormat
from baton.modeling.quantized.gptq import GptqFormat

_FORMATS: dict[str, Callable[[Fields], WeightFormat]] = {
    "compressed-tensors": CompressedTensorsFormat.read,
    "fp8": Fp8Format.read,
    "awq": AwqFormat.read,
    "gptq": GptqFormat.read,
    METHOD: GgufFormat.read,
}
"""Functions that read a format from its configuration, by the configuration's `quant_method`."""


def read_format(raw: object, source: str) -> WeightFormat:
    """Return the format that `raw`, the `quantization_config` of a model, describes. `source` is the file and field
    that error messages name. Raises ModelError, with a message of one line, for a format that is not supported."""
    if not isinstance(raw, Mapping):
        raise ModelError(f"{source}: is not an object; correct the file, or choose another model")
    fields = Fields(raw, source)
    method = raw.get("quant_method")
    if not isinstance(method, str) or method not in _FORMATS:
        others = ", ".join(name for name in _FORMATS if name != METHOD)
        remedy = f"use the unquantised model, a GGUF file, or weights in {others}"
        raise fields.error("quant_method", f"{method!r} is not supported", remedy)
    return _FORMATS[method](fields)
