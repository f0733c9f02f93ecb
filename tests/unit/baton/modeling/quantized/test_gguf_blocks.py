"""Blocks of GGUF files: their codes and scales represent the values that the gguf package computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from baton.errors import ModelError
from baton.modeling.families.checkpoint import Checkpoint
from baton.modeling.families.family import load_linear
from baton.modeling.quantized.gguf_blocks import GgufWeight, blocks_name
from baton.modeling.quantized.weight_formats import read_format
from baton.types import WEIGHT_FORMS
from tests.support.kernels.stored_values import values
from tests.support.models.gguf_blocks import TYPES, random_blocks, values_of

N, K = 32, 512
SOURCE = "config.json: quantization_config"


@pytest.mark.parametrize("type_name", TYPES)
def test_codes_and_scales_represent_the_values_of_the_gguf_package(type_name: str) -> None:
    blocks = random_blocks(type_name, N, K)
    weight = GgufWeight(type_name, blocks)
    assert torch.equal(values(weight.stored()), values_of(type_name, blocks))
    assert torch.equal(weight.rows(5, 9), values_of(type_name, blocks)[5:9])


@pytest.mark.parametrize("type_name", TYPES)
def test_a_checkpoint_dequantises_blocks(type_name: str, tmp_path: Path) -> None:
    blocks = random_blocks(type_name, N, K)
    save_file({blocks_name("m", type_name): blocks}, tmp_path / "model.safetensors")
    stored = read_format({"quant_method": "gguf", "types": list(TYPES)}, SOURCE)
    checkpoint = Checkpoint(tmp_path, torch.bfloat16, "cpu", weight_format=stored)
    assert torch.equal(checkpoint.take("m.weight", (N, K)), values_of(type_name, blocks).bfloat16())
    assert checkpoint.num_dequantised == 1


@pytest.mark.parametrize("types", [None, "Q4_0", ["Q4_0", "Q5_0"], [4], [["Q4_0"]], [{}]])
def test_unknown_types_are_refused(types: Any) -> None:
    with pytest.raises(ModelError, match="quantization_config: types: .* is not a list of Q4_0, Q4_1, .*; convert"):
        read_format({"quant_method": "gguf", "types": types}, SOURCE)


def test_rows_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    save_file({blocks_name("m", "Q4_K"): torch.zeros(N, 144, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    stored = read_format({"quant_method": "gguf", "types": ["Q4_K"]}, SOURCE)
    for weights in WEIGHT_FORMS:
        checkpoint = Checkpoint(tmp_path, torch.bfloat16, "cpu", weights=weights, weight_format=stored)
        with pytest.raises(
            ModelError, match="m.blocks_q4_k has blocks of 256, which do not divide 300; use the config"
        ):
            load_linear(checkpoint, {"m": N}, 300, bias=False)
