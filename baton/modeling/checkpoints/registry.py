"""Registry of model families. It selects the family that reads a Hugging Face config, and rejects models that no family
supports.

`weights` and `gguf` read configs with this module.
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
"""Supported models by `model_type` of config.json: the name of the architecture, and the function that reads the
config."""


def from_hf(
    raw: Mapping[str, object], generation: Mapping[str, object] | None = None, source: str = "config.json"
) -> ModelConfig:
    """Return the ModelConfig of the model that a Hugging Face config describes. `raw` is the content of config.json,
    and `generation` that of generation_config.json, or None. `source` names the config file in errors. Raises
    ModelError for missing fields, and for a model that the decoder does not support."""
    return read_model(raw, generation, source).config


def read_model(
    raw: Mapping[str, object], generation: Mapping[str, object] | None = None, source: str = "config.json"
) -> Family:
    """Return the model that a Hugging Face config describes. Missing optional fields get the defaults of transformers.

    `raw` is the content of config.json. `generation` is the content of generation_config.json, or None. End-of-sequence
    ids in `generation` take precedence over those in `raw`. `source` names the config file in errors. The quantisation
    of the weights is not read here, but by `baton.modeling.quantized.weight_formats`. Raises ModelError for missing
    fields, and for a model that the decoder does not support.
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
