"""A tiny random model over letters, written to a folder that any worker process can load, without the transformers
package."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from baton.modeling.kv.buffers import TORCH_DTYPES
from tests.support.models.tiny_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, write_letters

NUM_LAYERS = 6
MAX_TOKENS = 512


@dataclass(frozen=True)
class LetterShape:
    """Sizes of a letter model."""

    num_layers: int = NUM_LAYERS
    hidden: int = 64
    inner: int = 96
    num_heads: int = 4
    num_kv_heads: int = 2
    max_tokens: int = MAX_TOKENS
    vocab_size: int = VOCAB_SIZE
    """Size of the vocabulary: the tokens of letters, and optionally further tokens that no text contains."""


LETTERS = LetterShape()


def write_letter_model(
    folder: Path, seed: int = 0, shape: LetterShape = LETTERS, *, dtype: str = "float32", device: str = "cpu"
) -> Path:
    """Write weights, configuration and tokenizer, and return the folder. Random weights are generated on `device`.
    Logits spread over several units."""
    generator = torch.Generator(device).manual_seed(seed)
    hidden, inner = shape.hidden, shape.inner
    kv_width = hidden * shape.num_kv_heads // shape.num_heads

    def matrix(rows: int, columns: int = hidden) -> Tensor:
        drawn = torch.randn(rows, columns, generator=generator, device=device) * (1.5 / math.sqrt(columns))
        return drawn.to("cpu", TORCH_DTYPES[dtype])

    def norm() -> Tensor:
        drawn = 1.0 + 0.1 * torch.randn(hidden, generator=generator, device=device)
        return drawn.to("cpu", TORCH_DTYPES[dtype])

    tensors = {"model.embed_tokens.weight": matrix(shape.vocab_size), "lm_head.weight": matrix(shape.vocab_size)}
    tensors["model.norm.weight"] = norm()
    for layer in range(shape.num_layers):
        at = f"model.layers.{layer}"
        tensors |= {
            f"{at}.input_layernorm.weight": norm(),
            f"{at}.post_attention_layernorm.weight": norm(),
            f"{at}.self_attn.q_proj.weight": matrix(hidden),
            f"{at}.self_attn.k_proj.weight": matrix(kv_width),
            f"{at}.self_attn.v_proj.weight": matrix(kv_width),
            f"{at}.self_attn.o_proj.weight": matrix(hidden),
            f"{at}.mlp.gate_proj.weight": matrix(inner),
            f"{at}.mlp.up_proj.weight": matrix(inner),
            f"{at}.mlp.down_proj.weight": matrix(hidden, inner),
        }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_config(shape, dtype)))
    return write_letters(folder, shape.vocab_size)


def _config(shape: LetterShape, dtype: str) -> dict[str, object]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "max_position_embeddings": shape.max_tokens,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "torch_dtype": dtype,
    }
