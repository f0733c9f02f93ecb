"""Converts a GGUF file of a Llama, Qwen2 or Qwen3 model to a Hugging Face folder. Weights are dequantised to bf16 and
stored as safetensors.

The conversion runs before any worker starts. It blocks for some seconds per 100 MB, and keeps one tensor in memory at a
time.

GGUF files of architecture `llama` store the rows of Q and K for interleaved RoPE, in which dimension 2 i is paired with
2 i + 1. Baton's decoder and Hugging Face pair dimension i with i + H / 2, where H is the head dim. The converter
therefore reorders these rows. Files of Qwen models already use the pairs i and i + H / 2.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from torch import Tensor

from baton.errors import ModelError
from baton.modeling.checkpoints.gguf_config import GgufKeys, generation_config, hf_config
from baton.modeling.checkpoints.registry import from_hf
from baton.modeling.kv.buffers import byte_view
from baton.process.whole_files import whole

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"


def convert_gguf(path: Path, folder: Path, progress: Callable[[int, int], None]) -> None:
    """Write config.json, generation_config.json and model.safetensors (bf16) into `folder`, which must exist.
    Idempotent.

    `progress(done, total)` is called with the number of converted tensors, from 0 to total. Each file appears only when
    it is complete. config.json is written last, so a folder with config.json is complete. Raises ModelError with a
    one-line message if the file is truncated or not supported, or if the disk cannot be written.
    """
    with _one_line_errors(path):
        reader = GGUFReader(path)
        keys = GgufKeys({name: field.contents() for name, field in reader.fields.items()}, path)
        named = {tensor.name: tensor for tensor in reader.tensors}
        factors = named.pop(_ROPE_FACTORS, None)
        rope_factors = None if factors is None else dequantize(factors.data, factors.tensor_type)
        config = hf_config(keys, {name: _shape(tensor) for name, tensor in named.items()}, rope_factors)
        from_hf(config, source=str(path))  # refuses a model that could not be loaded
    tensors = {_hf_name(path, name): tensor for name, tensor in named.items()}
    heads = _permuted_heads(keys)
    try:
        with whole(folder / "model.safetensors") as partial, partial.open("wb") as file:
            file.write(_safetensors_header({name: _shape(tensor) for name, tensor in tensors.items()}))
            progress(0, len(tensors))
            for done, (name, tensor) in enumerate(tensors.items(), 1):
                file.write(byte_view(_bf16(path, tensor, heads.get(name.split(".")[-2]))))
                progress(done, len(tensors))
        for file_name, content in (("generation_config.json", generation_config(keys)), ("config.json", config)):
            with whole(folder / file_name) as partial:
                partial.write_text(json.dumps(content, indent=2))
    except OSError as error:
        remedy = "free disk space or choose another cache folder"
        raise ModelError(f"{folder}: cannot be written ({error.strerror}); {remedy}") from error


@contextmanager
def _one_line_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}); give the path of a .gguf file") from error
    except (ValueError, IndexError, KeyError) as error:  # raised by the reader for a truncated or foreign file
        problem = str(error).partition("\n")[0]
        raise ModelError(f"{path}: is truncated or not a GGUF file ({problem}); download it again") from error


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))


def _hf_name(path: Path, name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise ModelError(f"{path}: tensor {name} is not known in a Llama-family model; choose another model")
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def _permuted_heads(keys: GgufKeys) -> dict[str, int]:
    """Return the projections whose rows are stored for interleaved RoPE, with their numbers of heads."""
    if keys.architecture() != "llama":
        return {}
    num_heads = keys.count("llama.attention.head_count")
    return {"q_proj": num_heads, "k_proj": keys.count("llama.attention.head_count_kv", num_heads)}


def _bf16(path: Path, tensor: ReaderTensor, num_heads: int | None) -> Tensor:
    """Return the tensor, de-quantised in fp32, with its rows in our order, rounded to bf16."""
    try:
        values: npt.NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        problem = f"tensor {tensor.name} is quantised as {tensor.tensor_type.name}"
        raise ModelError(f"{path}: {problem}, which cannot be read; choose another quantisation") from error
    shape = _shape(tensor)
    if num_heads is not None:
        if shape[0] % (2 * num_heads):
            raise ModelError(
                f"{path}: tensor {tensor.name} does not have an even head of rows; download the file again"
            )
        values = values.reshape(num_heads, -1, 2, *shape[1:]).swapaxes(1, 2)
    return torch.tensor(values).reshape(shape).to(torch.bfloat16)


def _safetensors_header(shapes: dict[str, tuple[int, ...]]) -> bytes:
    """Return the header of a safetensors file whose tensors follow in this order, all bf16."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in shapes.items():
        end = start + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
