"""Tiny GGUF files of the Llama family, written as llama.cpp's converter writes them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

Array = npt.NDArray[np.float32]

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB = 64, 96, 4, 2, 16, 2, 128
_MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}


def tiny_keys(architecture: str) -> dict[str, object]:
    """Return the metadata keys of a tiny model. A test may change them before it writes them."""
    return {
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.context_length": 512,
        f"{architecture}.embedding_length": HIDDEN,
        f"{architecture}.feed_forward_length": INNER,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.attention.key_length": HEAD_DIM,
        f"{architecture}.attention.value_length": HEAD_DIM,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 10000.0,
        f"{architecture}.vocab_size": VOCAB,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def tiny_tensors(architecture: str, seed: int = 0) -> dict[str, Array]:
    """Return random tensors by GGUF name. The rows of Q and K are in Hugging Face's order. qwen2 has biases, and qwen3
    has norms per head."""
    random = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    width, kv_width = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    for layer in range(LAYERS):
        rows = {"attn_q": width, "attn_k": kv_width, "attn_v": kv_width, "ffn_gate": INNER, "ffn_up": INNER}
        shapes |= {f"blk.{layer}.{name}.weight": (count, HIDDEN) for name, count in rows.items()}
        shapes |= {f"blk.{layer}.attn_output.weight": (HIDDEN, width), f"blk.{layer}.ffn_down.weight": (HIDDEN, INNER)}
        shapes |= {f"blk.{layer}.{name}.weight": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
        if architecture == "qwen2":
            shapes |= {f"blk.{layer}.{name}.bias": (rows[name],) for name in ("attn_q", "attn_k", "attn_v")}
        if architecture == "qwen3":
            shapes |= {f"blk.{layer}.{name}.weight": (HEAD_DIM,) for name in ("attn_q_norm", "attn_k_norm")}
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def hf_name(name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor."""
    top = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    stem, _, kind = name.rpartition(".")
    if stem in top:
        return f"{top[stem]}.{kind}"
    _, layer, module = stem.split(".")
    return f"model.layers.{layer}.{_MODULES[module]}.{kind}"


def write_gguf(
    path: Path,
    architecture: str,
    keys: Mapping[str, object],
    tensors: Mapping[str, Array | npt.NDArray[np.uint8]],
    types: Mapping[str, GGMLQuantizationType] | None = None,
) -> None:
    """Write a GGUF file. `types` gives the types of tensors that are not F32. They are quantised unless they are bytes.
    Rows of Q and K are permuted as llama.cpp does."""
    writer = GGUFWriter(path, architecture)
    for key, value in keys.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            assert isinstance(value, list)
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        stored = _permuted(name, tensor) if architecture == "llama" else tensor
        kind = (types or {}).get(name)
        if kind is None:
            writer.add_tensor(name, stored)
        else:
            writer.add_tensor(name, stored if stored.dtype == np.uint8 else quantize(stored, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _permuted(name: str, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the rows of Q and K in llama.cpp's order, in which RoPE rotates neighbouring dimensions as a pair."""
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
    if heads is None:
        return rows
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))
