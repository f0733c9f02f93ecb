"""Tiny models for tests: random Hugging Face models of every supported family, and decoders created without
transformers.

`build_tiny(name, folder)` needs transformers, whose import takes seconds; `random_decoder()` needs only torch. All
weights are random, but scaled so that attention is not uniform and logits spread over several units. Results are
deterministic.
"""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from baton.modeling.checkpoints.registry import ModelConfig
from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.device.port import Device
from baton.modeling.forward.attention import Kernel
from baton.modeling.forward.decoder import Decoder, DecoderWeights
from baton.modeling.forward.layers import GatedMlp, Layer, Sequential
from baton.modeling.forward.linear import make_linear
from baton.modeling.forward.norms import RmsNorm, unchanged
from baton.modeling.forward.rope import RotaryTable
from baton.modeling.kv.buffers import TORCH_DTYPES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WINDOW = 8
"""Size in tokens of the sliding window of families that use one."""

_SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA = {"intermediate_size": 96, "num_key_value_heads": 2, "tie_word_embeddings": False}
_SHAPES: dict[str, dict[str, Any]] = {
    **{model_type: {**_SHAPE, **_LLAMA} for model_type in ("llama", "mistral", "qwen2", "qwen3")},
    "opt": {**_SHAPE, "ffn_dim": 96},
    "falcon": {**_SHAPE, "ffn_hidden_size": 96},
    "qwen3_moe": {
        **_SHAPE,
        **_LLAMA,
        "head_dim": 32,
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "phi3": {**_SHAPE, **_LLAMA},
    "gemma3_text": {
        **_SHAPE,
        **_LLAMA,
        "tie_word_embeddings": True,
        "head_dim": 32,
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 24,
        "sliding_window": WINDOW,
    },
}
"""Sizes of the tiny models, by model type."""
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
_LONG_FACTORS = [1.5 + 0.5 * pair for pair in range(8)]
_SHORT_FACTORS = [1.0 + 0.1 * pair for pair in range(8)]
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 32,
    "short_factor": _SHORT_FACTORS,
    "long_factor": _LONG_FACTORS,
}
_PARTIAL_ROPE = {
    **_LONG_ROPE,
    "partial_rotary_factor": 0.75,
    "short_factor": _SHORT_FACTORS[:6],
    "long_factor": _LONG_FACTORS[:6],
}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2_mha": ("llama", {"num_key_value_heads": 4}),
    "llama3_gqa_tied": ("llama", {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama_mqa": ("llama", {"num_key_value_heads": 1, "num_hidden_layers": 3}),
    "llama_linear": ("llama", {"rope_parameters": _LINEAR_ROPE}),
    "llama_yarn": ("llama", {"rope_parameters": _YARN_ROPE}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_sharded": ("llama", {"num_hidden_layers": 3}),
    "mistral_window": ("mistral", {"sliding_window": WINDOW, "head_dim": 32}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_untied": ("qwen3", {"head_dim": 8, "attention_bias": True}),
    "opt": ("opt", {}),
    "opt_350m": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt_galactica": (
        "opt",
        {"enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu"},
    ),
    "opt_untied": ("opt", {"tie_word_embeddings": False, "word_embed_proj_dim": 32, "num_hidden_layers": 3}),
    "opt_no_final_norm": ("opt", {"_remove_final_layer_norm": True}),
    "falcon_7b": ("falcon", {"num_hidden_layers": 3}),
    "falcon_40b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_11b": (
        "falcon",
        {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
    ),
    "falcon_rw_rotary": ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True, "alibi": False}),
    "phi3": ("phi3", {"num_key_value_heads": 4}),
    "phi3_window": ("phi3", {"sliding_window": WINDOW}),
    "phi3_long": ("phi3", {"rope_parameters": _LONG_ROPE, "original_max_position_embeddings": 32}),
    "phi4_mini": (
        "phi3",
        {
            "rope_parameters": _PARTIAL_ROPE,
            "original_max_position_embeddings": 32,
            "tie_word_embeddings": True,
            "sliding_window": 1024,
        },
    ),
    "gemma3": ("gemma3_text", {"sliding_window_pattern": 2}),
    "gemma3_scaled": (
        "gemma3_text",
        {
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe_sums": ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 3, "attention_bias": True}),
}
_SHARD_SIZE = {"llama_sharded": "100KB"}

TINY_NAMES = tuple(_FAMILIES)
"""Names of the models that `build_tiny` can build."""


def build_tiny(name: str, folder: Path) -> "PreTrainedModel":
    """Create the tiny model `name`, save it to `folder` as safetensors, and return it in fp32, in evaluation mode."""
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

    from_config: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config

    model_type, changes = _FAMILIES[name]
    changes = copy.deepcopy(changes)  # transformers writes defaults into its arguments
    config = AutoConfig.for_model(model_type, **{**_SHAPES[model_type], **changes})
    model = from_config(config, attn_implementation="eager", dtype=torch.float32)
    torch.nn.Module.eval(model)
    generator = torch.Generator().manual_seed(TINY_NAMES.index(name))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(_random_parameter(parameter_name, parameter, generator))
    model.save_pretrained(folder, max_shard_size=_SHARD_SIZE.get(name, "5GB"))
    return model


def load_tiny(name: str, folder: Path, dtype: str = "float32") -> Decoder:
    """Load the project's decoder of the tiny model `name`. The model is built in `folder` if it does not exist
    there."""
    if not (folder / "config.json").exists():
        build_tiny(name, folder)
    return load_decoder(folder, dtype=dtype)


def tiny_decoder(name: str, folder: Path) -> "tuple[Decoder, PreTrainedModel]":
    """Return the tiny model `name` in fp32 as the project's decoder and as the reference of transformers."""
    reference = build_tiny(name, folder)
    return load_decoder(folder), reference


def random_decoder(
    *,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    vocab_size: int = 97,
    seed: int = 0,
    dtype: str = "float32",
    max_position: int = 512,
    window: int | None = None,
    device: Device | None = None,
    kernel: Kernel | None = None,
) -> Decoder:
    """Create a random Llama-like decoder within milliseconds. Embeddings are not tied, and the hidden size is num_heads
    * head_dim. Its weights are the same on every device."""
    config = ModelConfig(
        model_type="llama",
        vocab_size=vocab_size,
        num_layers=num_layers,
        hidden_size=num_heads * head_dim,
        intermediate_size=2 * num_heads * head_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        tie_embeddings=False,
        rope_theta=10000.0,
        windows=(window,) * num_layers,
    )
    where = torch.device("cpu") if device is None else device.torch_device
    return Decoder(config, _random_weights(config, seed, dtype, where), kernel, device=device)


def _random_weights(config: ModelConfig, seed: int, dtype: str, where: torch.device) -> DecoderWeights:
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config.hidden_size, config.intermediate_size
    width = config.num_heads * config.head_dim

    def random(name: str, *shape: int) -> Tensor:
        return _random_parameter(name, torch.empty(shape), generator).to(where, TORCH_DTYPES[dtype])

    def norm() -> RmsNorm:
        return RmsNorm(random("norm", hidden), 1e-5)

    def layer() -> Layer:
        return Layer(
            attention_norm=norm(),
            qkv=make_linear(random("qkv", width + 2 * config.num_kv_heads * config.head_dim, hidden)),
            head_norm=unchanged,
            tail=Sequential(
                make_linear(random("o", hidden, width)),
                norm(),
                GatedMlp(
                    make_linear(random("gate_up", 2 * inner, hidden), gated=True),
                    make_linear(random("down", hidden, inner)),
                ),
            ),
        )

    return DecoderWeights(
        device=where,
        dtype=TORCH_DTYPES[dtype],
        embedding=make_linear(random("embed", config.vocab_size, hidden)),
        positions=RotaryTable(config, where, TORCH_DTYPES[dtype]),
        layers=tuple(layer() for _ in range(config.num_layers)),
        final_norm=norm(),
        head=make_linear(random("head", config.vocab_size, hidden), has_many_rows=False),
        fingerprint=f"random-{seed}-{config.num_layers}-{hidden}-{config.vocab_size}-{dtype}",
    )


def _random_parameter(name: str, like: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(like.shape, generator=generator)
    if name.endswith("bias"):
        return 0.2 * noise
    if like.dim() == 1:  # the weight of a norm
        return 1.0 + 0.1 * noise
    if "embed" in name:  # 0.4 also serves as a tied head over 64 hidden dimensions: logits of a few units
        return 0.4 * noise
    return 1.5 / math.sqrt(like.shape[-1]) * noise
