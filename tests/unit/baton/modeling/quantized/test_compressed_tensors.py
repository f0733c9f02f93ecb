"""compressed-tensors' formats, against the library's own compressors; and which scheme a module has."""

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file
from torch import Tensor

from baton.errors import ModelError
from baton.modeling.families.checkpoint import Checkpoint
from baton.modeling.quantized.weight_formats import read_format
from tests.support.models.quantised import packed_ints, plain_codes
from tests.support.models.quantised_folders import compressed_config

N, K = 72, 160
SETTINGS: dict[str, dict[str, Any]] = {
    "int4 groups": {"num_bits": 4, "strategy": "group", "group_size": 32},
    "int4 groups, zero points": {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
    "int4 channel, zero points": {"num_bits": 4, "strategy": "channel", "symmetric": False},
    "int8 channel": {"num_bits": 8, "strategy": "channel"},
    "int8 channel, zero points": {"num_bits": 8, "strategy": "channel", "symmetric": False},
    "int8 tensor": {"num_bits": 8, "strategy": "tensor"},
    "fp8 tensor": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "fp8 channel": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "fp8 blocks": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 128]},
}
LAYOUTS = [
    *((name, "pack-quantized") for name in SETTINGS if name.startswith("int") and "tensor" not in name),
    *((name, "int-quantized") for name in SETTINGS if name.startswith("int8")),
    *((name, "naive-quantized") for name in SETTINGS if name.startswith("int8")),
    *((name, "float-quantized") for name in SETTINGS if name.startswith("fp8")),
]


def load(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], module: str = "m") -> Tensor:
    save_file({f"{module}.{part}": tensor for part, tensor in tensors.items()}, folder / "model.safetensors")
    stored = read_format(config, "config.json: quantization_config")
    shape = (N, K) if module == "m" else (64, 64)
    return Checkpoint(folder, torch.float32, "cpu", weight_format=stored).take(f"{module}.weight", shape)


def ranges(weight: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    """The least and the greatest value of what shares a scale."""
    if args.strategy == "tensor":
        return weight.min().view(1), weight.max().view(1)
    if args.strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if args.strategy == "group":
        assert args.group_size is not None
        groups = weight.view(len(weight), -1, args.group_size)
        return groups.amin(2), groups.amax(2)
    assert args.block_structure is not None
    rows, columns = args.block_structure
    blocks = [torch.split(row, columns, 1) for row in torch.split(weight, rows)]
    return tuple(  # type: ignore[return-value]
        torch.stack([torch.stack([extreme(part) for part in row]) for row in blocks])
        for extreme in (torch.min, torch.max)
    )


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_weight_equals_that_of_the_library(name: str, layout: str, tmp_path: Path) -> None:
    args = QuantizationArgs(**SETTINGS[name])
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(1)) + 0.3
    scale, zero_point = calculate_qparams(*ranges(weight, args), args)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}
    compressor = BaseCompressor.get_value_from_registry(layout)
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(stored, scheme)["weight"]
    assert (expected - weight).abs().max() < 0.5, "the library's weight is not the one that was compressed"
    config = compressed_config(layout, **{"type": "int", **SETTINGS[name]})
    assert torch.equal(load(tmp_path, {part: tensor.contiguous() for part, tensor in stored.items()}, config), expected)


def config_of(groups: dict[str, dict[str, Any]], format: str = "mixed-precision") -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups, "ignore": ["lm_head"]}


def group(targets: list[str], format: str, **weights: Any) -> dict[str, Any]:
    return {"targets": targets, "weights": {"num_bits": 8, "type": "int", **weights}, "format": format}


def test_module_has_the_scheme_whose_target_fits_best(tmp_path: Path) -> None:
    """By name before by expression before by class, as the library has it; each group names its own layout."""
    int4 = {"num_bits": 4, "strategy": "group", "group_size": 32}
    config = config_of(
        {
            "by expression, later": group(["re:layers.*"], "float-quantized", type="float", strategy="channel"),
            "by expression": group(["re:.*v_proj$", "re:.*[kq]_proj"], "int-quantized", strategy="channel"),
            "by class and name": group(["Linear", "layers.0.q_proj"], "pack-quantized", **int4),
            "nothing": {"targets": ["re:.*norm"], "weights": None},
        }
    )
    made = {
        "layers.0.q_proj": packed_ints(64, 64, 1, group_size=32),
        "layers.1.q_proj": plain_codes(64, 64, 2, kind="int"),
        "layers.1.v_proj": plain_codes(64, 64, 3, kind="int"),
        "layers.1.v_proj_b": plain_codes(64, 64, 4),
        "lm_head": packed_ints(64, 64, 5, group_size=32),
    }
    for module, weight in made.items():
        assert torch.equal(load(tmp_path, weight.tensors, config, module), weight.weight), module


def test_embeddings_are_a_class_of_their_own(tmp_path: Path) -> None:
    made = packed_ints(64, 64, 1, bits=8)
    embeddings = group(["Embedding"], "pack-quantized", strategy="channel")
    linears = group(["Linear"], "float-quantized", type="float", strategy="channel")
    config = config_of({"linears": linears, "embeddings": embeddings})
    assert torch.equal(load(tmp_path, made.tensors, config, "model.embed_tokens"), made.weight)
    with pytest.raises(ModelError, match="embed_tokens.weight_scale belongs to no target of quantization_config"):
        load(tmp_path, made.tensors, config_of({"linears": linears}), "model.embed_tokens")


def test_modules_without_scales_are_plain(tmp_path: Path) -> None:
    plain = torch.randn(64, 64)
    config = compressed_config("float-quantized", type="float", num_bits=8, strategy="channel")
    assert torch.equal(load(tmp_path, {"weight": plain}, config, "lm_head"), plain)


def test_strategy_is_implied_by_the_group_size(tmp_path: Path) -> None:
    for group_size, strategy in ((32, "group"), (-1, "channel"), (None, "tensor")):
        weights = {"num_bits": 8, "type": "int", "group_size": group_size}
        implied = read_format(config_of({"g": {"targets": ["Linear"], "weights": weights}}, "int-quantized"), "c")
        assert implied.description == f"compressed-tensors, int-quantized int8 by {strategy}"


def test_shape_that_the_tensors_state_must_be_that_of_the_config(tmp_path: Path) -> None:
    made = packed_ints(64, 64, 1, group_size=32)
    config = compressed_config("pack-quantized", type="int", num_bits=4, strategy="group", group_size=32)
    tensors = {**made.tensors, "weight_shape": torch.tensor([64, 60])}
    with pytest.raises(ModelError, match=r"weight_shape says \[64, 60\], config.json asks for \[64, 64\]"):
        load(tmp_path, tensors, config, "q_proj")
    del tensors["weight_shape"]
    assert torch.equal(load(tmp_path, tensors, config, "q_proj"), made.weight)


def test_zero_points_of_packed_weights_may_be_stored_plain(tmp_path: Path) -> None:
    """Early versions of the library stored them so."""
    zeros = torch.randint(-8, 8, (64, 2), dtype=torch.int8, generator=torch.Generator().manual_seed(1))
    made = packed_ints(64, 64, 1, group_size=32)
    config = compressed_config(
        "pack-quantized", type="int", num_bits=4, strategy="group", group_size=32, symmetric=False
    )
    loaded = load(tmp_path, {**made.tensors, "weight_zero_point": zeros}, config, "q_proj")
    scales = made.tensors["weight_scale"].float()
    expected = made.weight - (zeros.float() * scales).repeat_interleave(32, 1)
    torch.testing.assert_close(loaded, expected)
    assert not torch.equal(loaded, made.weight)
