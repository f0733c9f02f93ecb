"""A tiny random model of letters as a folder that any worker process loads, without transformers."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.models.tiny_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, write_letters

NUM_LAYERS = 6
MAX_TOKENS = 512
_HIDDEN, _INNER, _HEADS, _KV_HEADS = 64, 96, 4, 2


def write_letter_model(folder: Path, seed: int = 0) -> Path:
    """Writes weights, configuration and tokenizer; returns the folder. Logits spread over several units."""
    generator = torch.Generator().manual_seed(seed)
    kv_width = _HIDDEN * _KV_HEADS // _HEADS

    def matrix(rows: int, columns: int = _HIDDEN) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * (1.5 / math.sqrt(columns))

    def norm() -> Tensor:
        return 1.0 + 0.1 * torch.randn(_HIDDEN, generator=generator)

    tensors = {"model.embed_tokens.weight": matrix(VOCAB_SIZE), "lm_head.weight": matrix(VOCAB_SIZE)}
    tensors["model.norm.weight"] = norm()
    for layer in range(NUM_LAYERS):
        at = f"model.layers.{layer}"
        tensors |= {
            f"{at}.input_layernorm.weight": norm(),
            f"{at}.post_attention_layernorm.weight": norm(),
            f"{at}.self_attn.q_proj.weight": matrix(_HIDDEN),
            f"{at}.self_attn.k_proj.weight": matrix(kv_width),
            f"{at}.self_attn.v_proj.weight": matrix(kv_width),
            f"{at}.self_attn.o_proj.weight": matrix(_HIDDEN),
            f"{at}.mlp.gate_proj.weight": matrix(_INNER),
            f"{at}.mlp.up_proj.weight": matrix(_INNER),
            f"{at}.mlp.down_proj.weight": matrix(_HIDDEN, _INNER),
        }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_config()))
    return write_letters(folder)


def _config() -> dict[str, object]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "max_position_embeddings": MAX_TOKENS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "torch_dtype": "float32",
    }
