"""Registry of model families: the family that reads each Hugging Face config, and the models that no family can run.

`weights` and `gguf` read configs here.
"""

from collections.abc import Callable, Mapping

from baton.modeling.families.falcon import FalconModel
from baton.modeling.families.family import Family
from baton.modeling.families.fields import Fields
from baton.modeling.families.gemma3 import Gemma3Model
from baton.modeling.families.llama import LlamaModel
from baton.modeling.families.opt import OptModel
from baton.modeling.families.phi3 import Phi3Model
from baton.modeling.families.qwen3_moe import Qwen3MoeModel
from baton.modeling.forward.model_config import ModelConfig, RopeScaling

__all__ = ["ModelConfig", "RopeScaling", "from_hf", "read_model"]

_FAMILIES: dict[str, tuple[str, Callable[[Fields], Family]]] = {
    "llama": ("LlamaForCausalLM", LlamaModel.read),
    "mistral": ("MistralForCausalLM", LlamaModel.read),
    "qwen2": ("Qwen2ForCausalLM", LlamaModel.read),
    "qwen3": ("Qwen3ForCausalLM", LlamaModel.read),
    "qwen3_moe": ("Qwen3MoeForCausalLM", Qwen3MoeModel.read),
    "phi3": ("Phi3ForCausalLM", Phi3Model.read),
    "gemma3_text": ("Gemma3ForCausalLM", Gemma3Model.read),
    "opt": ("OPTForCausalLM", OptModel.read),
    "falcon": ("FalconForCausalLM", FalconModel.read),
}
"""Architecture, and function that reads its config, by model type."""


def from_hf(
    raw: Mapping[str, object], generation: Mapping[str, object] | None = None, source: str = "config.json"
) -> ModelConfig:
    """Return the config of the model that `read_model` reads. Raises the same errors."""
    return read_model(raw, generation, source).config


def read_model(
    raw: Mapping[str, object], generation: Mapping[str, object] | None = None, source: str = "config.json"
) -> Family:
    """Return the model that a Hugging Face config describes. Absent optional fields have transformers' defaults.

    `raw` is config.json. `generation`, if given, is generation_config.json, whose end-of-sequence ids take precedence.
    `source` names the file in errors. Quantisation of weights is not read here, but by
    `baton.modeling.quantized.weight_formats`. Raises ModelError for a model that the decoder cannot run and for missing
    fields.
    """
    fields = Fields(raw, source, generation)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        remedy = f"choose a model of type {', '.join(_FAMILIES)}"
        raise fields.error("model_type", f"{model_type!r} is not supported", remedy)
    architecture, read = _FAMILIES[model_type]
    architectures = raw.get("architectures")
    if architectures and architectures != [architecture]:
        remedy = f"choose a model whose architecture is {architecture}"
        raise fields.error("architectures", f"{architectures!r} is not supported", remedy)
    return read(fields)
