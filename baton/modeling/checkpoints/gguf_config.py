"""Converts the metadata keys of a GGUF file to the fields of a Hugging Face config.json and generation_config.json.

`gguf` writes these fields to files. Most keys start with the name of the architecture. GGUF files do not name the RoPE
scaling of Llama 3. They store one factor per frequency instead. The scaling is recognised by comparing these factors
with those of released models.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.errors import ModelError
from baton.modeling.checkpoints.registry import from_hf
from baton.modeling.forward.rope import inverse_frequencies

_MODEL_TYPES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA3_FACTORS = (8.0, 16.0, 32.0)
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


class GgufKeys:
    """Key-value pairs of a GGUF file, with type checks. Errors name the file and the key."""

    def __init__(self, values: Mapping[str, object], path: Path) -> None:
        self._values = values
        self._path = path

    def error(self, key: str, problem: str, remedy: str = "choose another model") -> ModelError:
        return ModelError(f"{self._path}: {key} {problem}; {remedy}")

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._typed(key, default, str, "a text"))

    def count(self, key: str, default: int | None = None) -> int:
        return int(self._typed(key, default, int, "one whole number"))

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._typed(key, default, (int, float), "a number"))

    def has(self, key: str) -> bool:
        return key in self._values

    def architecture(self) -> str:
        """Return the architecture of the model. Raises ModelError if this architecture cannot be converted."""
        architecture = self.text("general.architecture")
        if architecture not in _MODEL_TYPES:
            remedy = f"choose a model of architecture {', '.join(_MODEL_TYPES)}"
            raise self.error("general.architecture", f"is {architecture!r}, which is not supported", remedy)
        if self.count(f"{architecture}.expert_count", 0):
            raise self.error(f"{architecture}.expert_count", "is above 0: mixtures of experts are not supported")
        if self.count("split.count", 0) > 1:
            remedy = "merge the parts first with llama.cpp's gguf-split --merge"
            raise self.error("split.count", "is above 1: the file is only a part of a model", remedy)
        return architecture

    def _typed(self, key: str, default: object, kind: type | tuple[type, ...], what: str) -> Any:
        value = self._values.get(key, default)
        if value is None:
            raise self.error(key, "is missing", "download the file again, or choose another model")
        if isinstance(value, bool) or not isinstance(value, kind):
            raise self.error(key, f"is {value!r}, not {what}")
        return value


def hf_config(
    keys: GgufKeys, shapes: Mapping[str, tuple[int, ...]], rope_factors: npt.NDArray[np.float32] | None
) -> dict[str, object]:
    """Return the fields of config.json for a GGUF file. `shapes` contains the shape of each tensor, by its GGUF name.
    `rope_factors` contains the factors on RoPE's wavelengths, `[head_dim / 2]`, or is None if the file has no such
    factors. Raises ModelError if the model is not supported."""
    architecture = keys.architecture()
    num_heads = keys.count(f"{architecture}.attention.head_count")
    hidden_size = keys.count(f"{architecture}.embedding_length")
    head_dim = keys.count(f"{architecture}.attention.key_length", hidden_size // max(num_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.count(f"{architecture}.{key}", head_dim) != head_dim:
            raise keys.error(f"{architecture}.{key}", f"is not {head_dim}, the keys' length, which is not supported")
    if "token_embd.weight" not in shapes:
        raise keys.error("tensor token_embd.weight", "is missing", "download the file again")
    config: dict[str, object] = {
        "architectures": [_MODEL_TYPES[architecture]],
        "model_type": architecture,
        "vocab_size": shapes["token_embd.weight"][0],
        "num_hidden_layers": keys.count(f"{architecture}.block_count"),
        "hidden_size": hidden_size,
        "intermediate_size": keys.count(f"{architecture}.feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.count(f"{architecture}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": keys.number(f"{architecture}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.count(f"{architecture}.context_length"),
        "rope_theta": keys.number(f"{architecture}.rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(keys, architecture),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": architecture == "llama" and "blk.0.attn_q.bias" in shapes,
        "mlp_bias": architecture == "llama" and "blk.0.ffn_gate.bias" in shapes,
        "torch_dtype": "bfloat16",
        **generation_config(keys),
    }
    if architecture == "llama" and keys.has("llama.attention.sliding_window"):
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
        config["sliding_window"] = keys.count("llama.attention.sliding_window")
    if rope_factors is not None:
        config["rope_scaling"] = _named_scaling(keys, config, rope_factors)
    return config


def generation_config(keys: GgufKeys) -> dict[str, object]:
    """Return the fields of generation_config.json: the ids of the begin-of-sequence and end-of-sequence tokens."""
    eos = [keys.count(f"tokenizer.ggml.{key}") for key in _EOS_KEYS if keys.has(f"tokenizer.ggml.{key}")]
    config: dict[str, object] = {"eos_token_id": sorted(set(eos))}
    if keys.has("tokenizer.ggml.bos_token_id"):
        config["bos_token_id"] = keys.count("tokenizer.ggml.bos_token_id")
    return config


def _rope_scaling(keys: GgufKeys, architecture: str) -> dict[str, object] | None:
    prefix = f"{architecture}.rope.scaling"
    kind = keys.text(f"{prefix}.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise keys.error(f"{prefix}.type", f"is {kind!r}, which is not supported")
    scaling: dict[str, object] = {"rope_type": kind, "factor": keys.number(f"{prefix}.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = keys.count(f"{prefix}.original_context_length")
    return scaling


def _named_scaling(
    keys: GgufKeys, config: Mapping[str, object], factors: npt.NDArray[np.float32]
) -> dict[str, object] | None:
    if np.all(factors == 1.0):
        return None
    plain, _ = inverse_frequencies(from_hf({**config, "rope_scaling": None}))
    for factor in _LLAMA3_FACTORS:
        scaling = {**_LLAMA3_ROPE, "factor": factor}
        scaled, _ = inverse_frequencies(from_hf({**config, "rope_scaling": scaling}))
        if scaled.numel() == factors.size and np.allclose((plain / scaled).numpy(), factors, rtol=1e-3):
            return scaling
    raise keys.error("tensor rope_freqs.weight", "holds a RoPE scaling that no Llama 3 release uses")
