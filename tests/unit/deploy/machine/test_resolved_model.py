"""A request's length is bounded by the slot and by the model, whichever is less. Weights are counted as loaded."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.numpy import save_file

from baton.errors import ConfigError
from baton.modeling.kernels import native
from baton.process.clock import SystemClock
from deploy.config.file import WrittenConfig
from deploy.groups.cluster import LocalCluster
from deploy.machine import resolved_model
from deploy.machine.cluster_plan import ClusterPlan
from deploy.machine.resolved_model import ResolvedModel
from tests.support.models.config_folders import TINY, write_config

CONTEXT = TINY["max_position_embeddings"]


@pytest.mark.parametrize(("slot", "expected"), [(100, 100), (CONTEXT, CONTEXT), (8192, CONTEXT)])
def test_the_smaller_bound_holds(tmp_path: Path, slot: int, expected: int) -> None:
    assert ResolvedModel(write_config(tmp_path)).max_tokens(slot) == expected


async def test_a_local_cluster_offers_no_more_than_the_model_takes(tmp_path: Path) -> None:
    plan = ClusterPlan(WrittenConfig({}).local.config, ResolvedModel(write_config(tmp_path)))
    assert LocalCluster(plan, SystemClock()).max_tokens == CONTEXT


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of 6 weights, whole as far as files go."""
    save_file({"a": np.zeros((2, 2), np.float16), "b": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    return tmp_path


def test_weights_are_counted_as_they_will_be_loaded(folder: Path) -> None:
    assert (ResolvedModel(folder).weight_bytes("bfloat16"), ResolvedModel(folder).weight_bytes("float32")) == (12, 24)


def test_a_truncated_weights_file_is_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x10")
    with pytest.raises(ConfigError, match="model.safetensors is not a safetensors file"):
        ResolvedModel(folder).weight_bytes("float32")


def test_packed_weights_are_counted_by_their_bits(folder: Path) -> None:
    tensors: dict[str, Any] = {"m.qweight": np.zeros((3, 5), np.int32), "m.scales": np.zeros(7, np.float16)}
    save_file(tensors, folder / "model.safetensors")
    int4_beside_int8 = {"input_activations": {"num_bits": 8}, "weights": {"num_bits": 4}}
    cases: list[tuple[dict[str, Any], int]] = [({"bits": 4}, 8), ({"bits": 8}, 4), ({}, 8), (int4_beside_int8, 8)]
    for settings, weights_a_word in cases:
        (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
        assert ResolvedModel(folder).weight_bytes("bfloat16") == 2 * (15 * weights_a_word + 7)
    (folder / "config.json").write_text("{}")
    (folder / "quant_config.json").write_text('{"w_bit": 8}')
    assert ResolvedModel(folder).weight_bytes("bfloat16") == 2 * (15 * 4 + 7)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "chosen_set", lambda: "x86-64-v3")


def test_codes_that_are_kept_are_counted_as_they_are_stored(folder: Path, kernels: None) -> None:
    tensors: dict[str, Any] = {
        "a.blocks_q4_k": np.zeros((2, 144), np.uint8),
        "b.blocks_q8_0": np.zeros((1, 68), np.uint8),
        "c.weight": np.zeros((4, 8), np.int8),
        "d.weight": np.zeros(10, np.float16),
    }
    save_file(tensors, folder / "model.safetensors")
    model = ResolvedModel(folder)
    num_packed, packed_bytes = 512 + 64 + 32, 288 + 68 + 32
    assert model.keeps_codes("bfloat16", "stored")
    assert model.weight_bytes("bfloat16", "stored") == packed_bytes + 20
    assert model.weight_bytes("bfloat16") == model.weight_bytes("bfloat16", "int8") == 2 * (num_packed + 10)
    assert model.weight_bytes("float32", "stored") == 4 * (num_packed + 10)
    assert model.bytes_per_weight("bfloat16", "stored") == (packed_bytes + 20) / (num_packed + 10)
    assert model.bytes_per_weight("bfloat16", "int8") == 1
    assert model.bytes_per_weight("bfloat16", "bfloat16") is None


@pytest.mark.parametrize("setting", ["desc_act", "actorder"])
def test_weights_whose_inputs_were_reordered_are_counted_as_dequantised(
    setting: str, folder: Path, kernels: None
) -> None:
    save_file({"m.qweight": np.zeros((3, 5), np.int32)}, folder / "model.safetensors")
    for value, num_bytes in ((False, 60), (True, 2 * 15 * 8)):
        config = {"quantization_config": {"bits": 4, setting: value}}
        (folder / "config.json").write_text(json.dumps(config))
        assert ResolvedModel(folder).weight_bytes("bfloat16", "stored") == num_bytes


def test_without_kernels_weights_are_dequantised(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "chosen_set", lambda: None)
    save_file({"a.blocks_q4_0": np.zeros((2, 18), np.uint8)}, folder / "model.safetensors")
    assert ResolvedModel(folder).weight_bytes("bfloat16", "stored") == 2 * 64


def test_sizes_of_blocks_are_those_of_the_gguf_package() -> None:
    for name, sizes in resolved_model._BLOCKS.items():
        assert GGML_QUANT_SIZES[GGMLQuantizationType[name.removeprefix("blocks_").upper()]] == sizes
