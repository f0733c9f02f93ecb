"""Converts a GGUF file of a Llama, Qwen2 or Qwen3 model to a Hugging Face folder with a safetensors file.

Quantised weights keep their blocks if `baton.modeling.quantized.gguf_blocks` reads blocks of their type. Other tensors
are converted to bf16.

The conversion runs before any worker starts. It blocks for some seconds per 100 MB, and keeps one tensor in memory at a
time.

GGUF files of architecture `llama` store the rows of Q and K for interleaved RoPE, in which dimension 2 i is paired with
2 i + 1. Baton's decoder and Hugging Face pair dimension i with i + H / 2, where H is the head dim. The converter
therefore reorders these rows. Files of Qwen models already use the pairs i and i + H / 2.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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
from baton.modeling.quantized.gguf_blocks import METHOD, blocks_name, is_kept
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


def convert_gguf(path: Path, folder: Path, progress: Callable[[int, int], None], *, dequantised: bool = False) -> None:
    """Write config.json, generation_config.json and model.safetensors into `folder`, which must exist. If `dequantised`
    is set, all weights are converted to bf16. Idempotent.

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
    heads = _permuted_heads(keys)
    tensors = [_Tensor(path, tensor, _hf_name(path, name), heads, dequantised) for name, tensor in named.items()]
    if kept := {each.stored.tensor_type.name for each in tensors if each.keeps_blocks}:
        config["quantization_config"] = {"quant_method": METHOD, "types": sorted(kept)}
    try:
        with whole(folder / "model.safetensors") as partial, partial.open("wb") as file:
            file.write(_safetensors_header(tensors))
            progress(0, len(tensors))
            for done, tensor in enumerate(tensors, 1):
                with _one_line_errors(path):
                    data = byte_view(tensor.content())
                file.write(data)
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


@dataclass(frozen=True)
class _Tensor:
    """Tensor of a GGUF file, and the tensor to which it is converted."""

    path: Path
    stored: ReaderTensor
    hf_name: str
    heads: Mapping[str, int]
    """Number of heads by projection, for the projections whose rows are stored for interleaved RoPE."""
    dequantised: bool

    @property
    def keeps_blocks(self) -> bool:
        """Return True if the converted tensor has the blocks of the file."""
        return not self.dequantised and len(self.stored.shape) == 2 and is_kept(self.stored.tensor_type.name)

    @property
    def name(self) -> str:
        module = self.hf_name.removesuffix(".weight")
        return blocks_name(module, self.stored.tensor_type.name) if self.keeps_blocks else self.hf_name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.data.shape if self.keeps_blocks else _shape(self.stored)

    def content(self) -> Tensor:
        """Return blocks as bytes, or values rounded to bf16, with the rows in the decoder's order."""
        rows = self.stored.data if self.keeps_blocks else self._values()
        num_heads = self.heads.get(self.hf_name.split(".")[-2])
        if num_heads is not None:
            if self.shape[0] % (2 * num_heads):
                problem = f"tensor {self.stored.name} does not have an even head of rows"
                raise ModelError(f"{self.path}: {problem}; download the file again")
            rows = rows.reshape(num_heads, -1, 2, *self.shape[1:]).swapaxes(1, 2)
        converted = torch.tensor(rows).reshape(self.shape)
        return converted if self.keeps_blocks else converted.to(torch.bfloat16)

    def _values(self) -> npt.NDArray[np.float32]:
        try:
            values: npt.NDArray[np.float32] = dequantize(self.stored.data, self.stored.tensor_type)
        except NotImplementedError as error:
            problem = f"tensor {self.stored.name} is quantised as {self.stored.tensor_type.name}"
            raise ModelError(f"{self.path}: {problem}, which cannot be read; choose another quantisation") from error
        return values


def _safetensors_header(tensors: Iterable[_Tensor]) -> bytes:
    """Return the header of a safetensors file whose tensors follow in this order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        dtype, size = ("U8", 1) if tensor.keeps_blocks else ("BF16", 2)
        end = start + size * int(np.prod(tensor.shape))
        header[tensor.name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
