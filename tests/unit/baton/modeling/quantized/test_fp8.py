"""FP8 beside its scales, against the block converter of compressed-tensors, and scales that are powers of two."""

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.entrypoints.convert.converters import FP8BlockDequantizer
from safetensors.torch import save_file
from torch import Tensor

from baton.modeling.families.checkpoint import Checkpoint
from baton.modeling.quantized.weight_formats import read_format

N, K = 200, 300
RANDOM = torch.Generator().manual_seed(1)
CODES = (100 * torch.randn(N, K, generator=RANDOM)).to(torch.float8_e4m3fn)


def load(folder: Path, tensors: dict[str, Tensor], **changes: Any) -> Tensor:
    save_file(tensors, folder / "model.safetensors")
    stored = read_format({"quant_method": "fp8", **changes}, "config.json: quantization_config")
    return Checkpoint(folder, torch.float32, "cpu", weight_format=stored).take("m.weight", (N, K))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_equals_that_of_the_block_converter(dtype: torch.dtype, tmp_path: Path) -> None:
    scales = torch.rand(2, 3, generator=RANDOM).to(dtype)
    tensors = {"m.weight": CODES, "m.weight_scale_inv": scales}
    mine = load(tmp_path, tensors, weight_block_size=[128, 128])
    converter = FP8BlockDequantizer(targets=["m"], weight_block_size=(128, 128), dtype=torch.float32)
    assert torch.equal(mine, converter.process(dict(tensors))["m.weight"])


def test_scales_that_are_powers_of_two(tmp_path: Path) -> None:
    scales = torch.tensor([[-3, 0, 1], [2, -7, -1]]).float().exp2()
    stored = {"m.weight": CODES, "m.weight_scale_inv": scales.to(torch.float8_e8m0fnu)}
    mine = load(tmp_path, stored, weight_block_size=[128, 128], scale_fmt="ue8m0")
    plain = load(tmp_path, {**stored, "m.weight_scale_inv": scales}, weight_block_size=[128, 128])
    assert torch.equal(mine, plain)


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_for_the_whole_weight(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    mine = load(tmp_path, {"m.weight": CODES, f"m.{name}": torch.full(shape, 0.37)})
    assert torch.equal(mine, CODES.float() * torch.tensor(0.37))


def test_modules_that_were_not_converted_are_plain(tmp_path: Path) -> None:
    plain = torch.randn(N, K, generator=RANDOM)
    assert torch.equal(load(tmp_path, {"m.weight": plain}, modules_to_not_convert=["m"]), plain)
