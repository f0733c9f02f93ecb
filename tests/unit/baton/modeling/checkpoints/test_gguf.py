"""The GGUF converter: what it writes for each architecture, and what it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors import safe_open

from baton.errors import ModelError
from baton.modeling.checkpoints.gguf import convert_gguf
from baton.modeling.checkpoints.weights import load_config, load_decoder
from baton.modeling.forward.norms import HeadNorms
from tests.support.models.tiny_gguf import HEAD_DIM, Array, hf_name, tiny_keys, tiny_tensors, write_gguf

ARCHITECTURES = ["llama", "qwen2", "qwen3"]


def ignore_progress(done: int, total: int) -> None:
    assert done <= total


def convert(
    folder: Path, architecture: str, changes: dict[str, object] | None = None, more: dict[str, Array] | None = None
) -> Path:
    """Writes a tiny file with these changed keys (None: left out) and added tensors, and converts it into `folder`."""
    keys = {**tiny_keys(architecture), **(changes or {})}
    keys = {key: value for key, value in keys.items() if value is not None}
    write_gguf(folder / "tiny.gguf", architecture, keys, {**tiny_tensors(architecture), **(more or {})})
    convert_gguf(folder / "tiny.gguf", folder, ignore_progress)
    return folder


def refusal(
    folder: Path, architecture: str, changes: dict[str, object] | None = None, more: dict[str, Array] | None = None
) -> str:
    """The one line with which a file is refused; nothing that could be loaded is left."""
    with pytest.raises(ModelError) as refused:
        convert(folder, architecture, changes, more)
    assert [path.name for path in folder.iterdir()] == ["tiny.gguf"]
    assert "\n" not in str(refused.value)
    assert "tiny.gguf" in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_tensor_comes_back_in_hugging_faces_order(architecture: str, tmp_path: Path) -> None:
    convert(tmp_path, architecture)
    expected = {hf_name(name): torch.from_numpy(value) for name, value in tiny_tensors(architecture).items()}
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(expected)
        for name, value in expected.items():
            assert torch.equal(file.get_tensor(name), value.to(torch.bfloat16)), name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_converted_folder_loads_and_runs_the_architecture(architecture: str, tmp_path: Path) -> None:
    decoder = load_decoder(convert(tmp_path, architecture))
    assert decoder.config.model_type == architecture
    assert (decoder.weights.layers[1].qkv.bias() is not None) == (architecture == "qwen2")
    assert isinstance(decoder.weights.layers[1].head_norm, HeadNorms) == (architecture == "qwen3")
    assert decoder.config.tie_embeddings


def test_output_head_makes_the_model_untied(tmp_path: Path) -> None:
    head = np.ones((128, 64), dtype=np.float32)
    decoder = load_decoder(convert(tmp_path, "llama", more={"output.weight": head}))
    assert not decoder.config.tie_embeddings
    assert torch.equal(decoder.weights.head.weight(), torch.ones(128, 64))


def test_config_holds_the_keys_values(tmp_path: Path) -> None:
    config = load_config(convert(tmp_path, "llama", {"llama.rope.freq_base": 50000.0, "llama.context_length": 640}))
    assert (config.rope_theta, config.max_position, config.num_kv_heads) == (50000.0, 640, 2)
    assert (config.eos_token_ids, config.bos_token_id) == ((2,), 1)


def test_end_of_turn_and_end_of_message_also_end_a_text(tmp_path: Path) -> None:
    convert(tmp_path, "llama", {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 2})
    assert load_config(tmp_path).eos_token_ids == (2, 7)
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == [2, 7]


def test_llama_with_a_sliding_window_becomes_mistral(tmp_path: Path) -> None:
    config = load_config(convert(tmp_path, "llama", {"llama.attention.sliding_window": 8}))
    assert (config.model_type, config.windows) == ("mistral", (8, 8))


def test_llama_biases_are_seen_and_their_rows_put_back(tmp_path: Path) -> None:
    widths = {"attn_q": 64, "attn_k": 32, "attn_v": 32, "attn_output": 64}
    biases = {
        f"blk.{layer}.{name}.bias": np.arange(width, dtype=np.float32)
        for layer in range(2)
        for name, width in widths.items()
    }
    decoder = load_decoder(convert(tmp_path, "llama", more=biases))
    expected = torch.cat([torch.arange(width).to(torch.bfloat16).float() for width in (64, 32, 32)])
    bias_K = decoder.weights.layers[1].qkv.bias()
    assert bias_K is not None
    assert torch.equal(bias_K, expected)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_named_rope_scaling_is_kept(kind: str, tmp_path: Path) -> None:
    scaling = {"type": kind, "factor": 4.0, "original_context_length": 128}
    convert(tmp_path, "qwen2", {f"qwen2.rope.scaling.{key}": value for key, value in scaling.items()})
    config = load_config(tmp_path)
    assert (config.rope_scaling.kind, config.rope_scaling.factor) == (kind, 4.0)
    assert config.rope_scaling.original_max_position == (128 if kind == "yarn" else 0)


def llama3_rope_factors(factor: float) -> Array:
    """Factors as llama.cpp's converter computes them for Llama 3.1 and later (base 10000 here)."""
    inv_freq = 1.0 / 10000.0 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    factors = []
    for wavelength in 2 * np.pi / inv_freq:
        smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
        kept = 1.0 if wavelength < 8192 / 4.0 else 0.0 if wavelength > 8192 / 1.0 else smooth
        factors.append(1.0 / ((1.0 - kept) / factor + kept))
    return np.array(factors, dtype=np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_scaling_is_recognised_by_its_factors(factor: float, tmp_path: Path) -> None:
    config = load_config(convert(tmp_path, "llama", more={"rope_freqs.weight": llama3_rope_factors(factor)}))
    assert (config.rope_scaling.kind, config.rope_scaling.factor) == ("llama3", factor)
    assert config.rope_scaling.original_max_position == 8192


def test_rope_factors_of_one_mean_no_scaling(tmp_path: Path) -> None:
    ones = np.ones(HEAD_DIM // 2, dtype=np.float32)
    assert load_config(convert(tmp_path, "llama", more={"rope_freqs.weight": ones})).rope_scaling.kind == "default"


def test_unknown_rope_factors_are_refused(tmp_path: Path) -> None:
    factors = np.linspace(1.0, 3.0, HEAD_DIM // 2, dtype=np.float32)
    assert "rope_freqs.weight" in refusal(tmp_path, "llama", more={"rope_freqs.weight": factors})


@pytest.mark.parametrize(
    "key",
    ["block_count", "context_length", "embedding_length", "feed_forward_length", "attention.layer_norm_rms_epsilon"],
)
def test_missing_key_is_named(key: str, tmp_path: Path) -> None:
    assert f"llama.{key} is missing" in refusal(tmp_path, "llama", {f"llama.{key}": None})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"llama.expert_count": 8}, "expert_count"),
        ({"split.count": 2}, "split.count"),
        ({"llama.feed_forward_length": [96, 128]}, "feed_forward_length"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count"),
        ({"llama.attention.value_length": 8}, "value_length"),
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type"),
        ({"llama.attention.head_count": 0}, "num_attention_heads"),
        ({"tokenizer.ggml.eos_token_id": "2"}, "eos_token_id"),
    ],
)
def test_keys_that_cannot_be_run_are_refused(changes: dict[str, object], named: str, tmp_path: Path) -> None:
    assert named in refusal(tmp_path, "llama", changes)


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", "gemma2", tiny_keys("gemma2"), tiny_tensors("llama"))
    with pytest.raises(ModelError, match="'gemma2', which is not supported; choose a model of architecture llama"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path, ignore_progress)


def test_unknown_tensor_is_refused(tmp_path: Path) -> None:
    extra = {"blk.0.attn_sinks.weight": np.ones(4, dtype=np.float32)}
    assert "blk.0.attn_sinks.weight" in refusal(tmp_path, "llama", more=extra)


def test_unreadable_quantisation_is_refused(tmp_path: Path) -> None:
    tensors = tiny_tensors("llama")
    write_gguf(tmp_path / "tiny.gguf", "llama", tiny_keys("llama"), tensors)
    data = (tmp_path / "tiny.gguf").read_bytes()
    name = b"blk.0.attn_v.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8  # behind the number of dimensions and two of them
    (tmp_path / "tiny.gguf").write_bytes(
        data[:at] + int(GGMLQuantizationType.I8).to_bytes(4, "little") + data[at + 4 :]
    )
    with pytest.raises(ModelError, match=r"blk.0.attn_v.weight is quantised as I8.*choose another quantisation"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path, ignore_progress)
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize("fraction", [0.0, 0.0001, 0.001, 0.01, 0.5, 0.9999])
def test_truncated_file_is_refused(fraction: float, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    convert(whole, "llama")
    data = (whole / "tiny.gguf").read_bytes()
    (tmp_path / "tiny.gguf").write_bytes(data[: int(len(data) * fraction)])
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(ModelError, match=r"is truncated or not a GGUF file .* download it again") as refused:
        convert_gguf(tmp_path / "tiny.gguf", target, ignore_progress)
    assert "\n" not in str(refused.value)
    assert not list(target.iterdir())


@pytest.mark.parametrize(
    ("place", "number"),
    [("dimension", 0)]
    + [
        (place, number)
        for place in ("tensors", "keys", "name", "dimension", "offset")
        for number in (2**31, 2**40, 2**62, 2**63 - 1, 2**63)
    ],
)
def test_numbers_that_are_not_true_of_the_file_are_refused(place: str, number: int, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", "llama", tiny_keys("llama"), tiny_tensors("llama"))
    data, name = bytearray((tmp_path / "tiny.gguf").read_bytes()), b"blk.0.attn_q.weight"
    after = data.index(name) + len(name)  # then 4 bytes, two dimensions, the type in 4 bytes, and the offset
    places = {"tensors": 8, "keys": 16, "name": after - len(name) - 8, "dimension": after + 4, "offset": after + 24}
    at = places[place]
    data[at : at + 8] = number.to_bytes(8, "little")
    (tmp_path / "tiny.gguf").write_bytes(data)
    with pytest.raises(ModelError) as refused:
        convert_gguf(tmp_path / "tiny.gguf", tmp_path, ignore_progress)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "config.json").exists()


def test_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"PK\x03\x04" * 1000)
    with pytest.raises(ModelError, match="not a GGUF file"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path, ignore_progress)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none.gguf: cannot be read \(No such file"):
        convert_gguf(tmp_path / "none.gguf", tmp_path, ignore_progress)


def test_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", "llama", tiny_keys("llama"), tiny_tensors("llama"))
    with pytest.raises(ModelError, match="cannot be written"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "none", ignore_progress)


def test_progress_counts_every_tensor(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", "llama", tiny_keys("llama"), tiny_tensors("llama"))
    calls: list[tuple[int, int]] = []
    convert_gguf(tmp_path / "tiny.gguf", tmp_path, lambda done, total: calls.append((done, total)))
    total = len(tiny_tensors("llama"))
    assert calls == [(done, total) for done in range(total + 1)]


def test_failure_half_way_leaves_nothing_to_load(tmp_path: Path) -> None:
    def fail(done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    write_gguf(tmp_path / "tiny.gguf", "llama", tiny_keys("llama"), tiny_tensors("llama"))
    with pytest.raises(KeyboardInterrupt):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path, fail)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]
