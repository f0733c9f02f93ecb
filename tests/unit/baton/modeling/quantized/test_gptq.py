"""GPTQ's tensors: groups of inputs, zero points that borrow, and modules with settings of their own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from baton.errors import ModelError
from baton.modeling.families.checkpoint import Checkpoint
from baton.modeling.quantized.weight_formats import read_format
from tests.support.models.quantised import Quantised, gptq

N, K = 64, 96
CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}


def load(folder: Path, tensors: dict[str, Tensor], module: str = "m", **changes: Any) -> Tensor:
    save_file({f"{module}.{part}": tensor for part, tensor in tensors.items()}, folder / "model.safetensors")
    stored = read_format({**CONFIG, **changes}, "config.json: quantization_config")
    return Checkpoint(folder, torch.float32, "cpu", weight_format=stored).take(f"{module}.weight", (N, K))


@pytest.fixture
def made() -> Quantised:
    return gptq(N, K, 1, group_size=32)


def test_inputs_lie_in_order_where_no_tensor_lists_their_groups(made: Quantised, tmp_path: Path) -> None:
    tensors = dict(made.tensors)
    del tensors["g_idx"]
    assert torch.equal(load(tmp_path, tensors), made.weight)


@pytest.mark.parametrize("filler", [0, -1])
def test_inputs_lie_in_order_where_the_list_was_never_filled(filler: int, made: Quantised, tmp_path: Path) -> None:
    tensors = {**made.tensors, "g_idx": torch.full((K,), filler, dtype=torch.int32)}
    assert torch.equal(load(tmp_path, tensors), made.weight)
    with pytest.raises(ModelError, match="tensor m.g_idx does not name one of 3 groups for each input"):
        load(tmp_path, tensors, desc_act=True)


@pytest.mark.parametrize("group", [-1, 3])
def test_group_that_there_is_not_is_refused(group: int, made: Quantised, tmp_path: Path) -> None:
    groups = made.tensors["g_idx"].clone()
    groups[5] = group
    with pytest.raises(ModelError, match="m.g_idx does not name one of 3 groups"):
        load(tmp_path, {**made.tensors, "g_idx": groups})


def test_reordered_inputs_are_read_whatever_the_config_says_of_their_order(tmp_path: Path) -> None:
    reordered = gptq(N, K, 2, group_size=32, act_order=True)
    assert torch.equal(load(tmp_path, reordered.tensors), reordered.weight)


def test_inputs_that_fill_no_whole_group(tmp_path: Path) -> None:
    made = gptq(N, K, 3, group_size=64)
    assert made.tensors["scales"].shape == (2, N)
    assert torch.equal(load(tmp_path, made.tensors, group_size=64), made.weight)


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_of_zero_borrow_from_their_neighbours_in_version_1(bits: int, tmp_path: Path) -> None:
    made = gptq(N, K, 4, bits=bits, group_size=32, symmetric=False)
    words = made.tensors["qzeros"]
    words[0, 0] = (0x88888880 if bits == 4 else 0x80808000) - (0x11111111 if bits == 4 else 0x01010101)
    zeros = load(tmp_path, {**made.tensors, "qweight": torch.zeros_like(made.tensors["qweight"])}, bits=bits, sym=False)
    scales = made.tensors["scales"][0].float()
    expected = [0.0, *[-float(1 << (bits - 1)) for _ in range(32 // bits - 1)]]
    assert (zeros[: 32 // bits, 0] / scales[: 32 // bits]).tolist() == expected


@pytest.mark.parametrize("version", [1, 2])
def test_version_that_cannot_be_is_refused_for_symmetric_weights(version: int, tmp_path: Path) -> None:
    """The zero points of symmetric weights are known, so that a wrong version shows."""
    made = gptq(N, K, 5, group_size=32, version=version)
    wrong, right = ("gptq", "gptq_v2") if version == 2 else ("gptq_v2", "gptq")
    assert torch.equal(load(tmp_path, made.tensors, checkpoint_format=right), made.weight)
    with pytest.raises(ModelError, match="m.qzeros holds zero points other than 8, .* correct checkpoint_format"):
        load(tmp_path, made.tensors, checkpoint_format=wrong)


def test_modules_may_have_settings_of_their_own(tmp_path: Path) -> None:
    dynamic = {
        "-:.*left_out": {},
        "+:.*first": {"bits": 8, "group_size": 16, "sym": False},
        ".*second": {"group_size": -1, "desc_act": True},
        ".*": {"bits": 8},
    }
    first = gptq(N, K, 6, bits=8, group_size=16, symmetric=False)
    assert torch.equal(load(tmp_path, first.tensors, "a.first", dynamic=dynamic), first.weight)
    second = gptq(N, K, 7)
    assert torch.equal(load(tmp_path, second.tensors, "a.second", dynamic=dynamic), second.weight)
    plain = torch.randn(N, K)
    assert torch.equal(load(tmp_path, {"weight": plain}, "a.left_out", dynamic=dynamic), plain)
