"""A decoder on a device gives the logits, KV and tokens of the CPU."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.device.port import Device
from baton.modeling.forward.attention import plain_kernel
from baton.modeling.forward.decoder import Decoder
from baton.modeling.kv.buffers import BufferSpan, KvBuffer
from baton.types import TokenRange
from tests.support.models.tiny_models import build_tiny, random_decoder

Make = Callable[..., Decoder]
LENGTHS = (37, 9, 20)
NUM_STEPS = 3
SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {"num_layers": 3},
    "one_kv_head": {"num_kv_heads": 1, "head_dim": 32},
    "every_head": {"num_kv_heads": 4},
    "window": {"window": 8},
}
REAL = {"num_layers": 2, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "vocab_size": 4096}
"""The layers of a model of 7 billion weights, and few tokens."""
TOLERANCES = {"float32": 2e-5, "float16": 1e-2, "bfloat16": 5e-2}
"""Largest difference as a part of the largest value, by dtype."""
HF_PROMPT = list(range(3, 40))


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return list(torch.randint(0, 95, (length,), generator=generator).tolist())


@torch.inference_mode()
def run(decoder: Decoder, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, list[Tensor]]:
    """Logits of all tokens, and KV: prompts in two chunks, ragged in a batch, then tokens one by one."""
    buffers = [decoder.device.buffer(decoder.layout, TokenRange(0, len(ids))) for ids in prompts]
    ends = [(len(ids) // 2, *range(len(ids) - NUM_STEPS, len(ids) + 1)) for ids in prompts]
    logits = []
    for at in range(NUM_STEPS + 2):
        tokens = [TokenRange(each[at - 1] if at else 0, each[at]) for each in ends]
        ids = [token for each, part in zip(prompts, tokens, strict=True) for token in each[part.start : part.end]]
        spans = [BufferSpan(buffer, part) for buffer, part in zip(buffers, tokens, strict=True)]
        logits.append(decoder.logits(decoder.forward(ids, spans)).cpu())
    return torch.cat(logits), [buffer.data.float().cpu().clone() for buffer in buffers]  # it goes with its buffer


def assert_near(found: Tensor, expected: Tensor, dtype: str) -> None:
    assert float((found - expected).abs().max() / expected.abs().max()) <= TOLERANCES[dtype]


def check(make: Make, dtype: str, **shape: Any) -> None:
    prompts = [prompt(length) for length in LENGTHS]
    logits, kv = run(make(dtype=dtype, **shape), prompts)
    expected, expected_kv = run(random_decoder(dtype=dtype, **shape), prompts)
    assert_near(logits, expected, dtype)
    for found, right in zip(kv, expected_kv, strict=True):
        assert_near(found, right, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_kv_are_those_of_the_cpu(make: Make, shape: str, dtype: str) -> None:
    check(make, dtype, **SHAPES[shape])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_of_real_shapes_are_those_of_the_cpu(make: Make, dtype: str) -> None:
    check(make, dtype, **REAL)


@torch.inference_mode()
def greedy(decoder: Decoder, ids: Sequence[int], num_tokens: int) -> list[int]:
    """Tokens one by one, over KV that is kept."""
    buffer = decoder.device.buffer(decoder.layout, TokenRange(0, len(ids) + num_tokens))
    found, fresh, start = list[int](), list(ids), 0
    for _ in range(num_tokens):
        tokens = TokenRange(start, start + len(fresh))
        hidden_TD = decoder.forward(fresh, [BufferSpan(buffer, tokens)])
        fresh, start = [int(decoder.logits(hidden_TD[-1:]).argmax())], tokens.end
        found += fresh
    return found


@pytest.mark.parametrize("seed", range(3))
def test_greedy_tokens_are_those_of_the_cpu(make: Make, seed: int) -> None:
    ids = prompt(23, seed=seed)
    assert greedy(make(seed=seed), ids, 40) == greedy(random_decoder(seed=seed), ids, 40)


@pytest.mark.parametrize(
    "name", ["llama3_gqa_tied", "qwen3", "mistral_window", "opt", "falcon_40b", "phi4_mini", "gemma3", "qwen3_moe"]
)
def test_every_kind_of_family_is_loaded_to_the_device(device: Device, tmp_path: Path, name: str) -> None:
    build_tiny(name, tmp_path)
    there, here = load_decoder(tmp_path, device=device), load_decoder(tmp_path)
    if device.name == "cuda":
        there = Decoder(there.config, there.weights, plain_kernel, device=device)
    assert there.weights.device == device.torch_device
    assert there.layout == here.layout
    logits, _ = run(there, [HF_PROMPT])
    expected, _ = run(here, [HF_PROMPT])
    assert_near(logits, expected, "float32")


def test_memory_that_was_not_written_shows(device: Device, make: Make) -> None:
    """The checks above can fail: KV that nobody wrote is NaN. On `emulated` rows of a slot are so, and buffers zero."""
    decoder = make()
    memory = device.row_memory(decoder.layout, 8)
    memory.expect(8)
    memory.commit(TokenRange(0, 8))
    buffer = KvBuffer.of(decoder.layout, TokenRange(0, 8), memory.data_LS2GH, memory.access)
    with torch.inference_mode():
        hidden_TD = decoder.forward([1], [BufferSpan(buffer, TokenRange(7, 8))])
    assert bool(hidden_TD.isnan().any())
