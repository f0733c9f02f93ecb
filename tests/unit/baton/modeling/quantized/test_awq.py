"""AWQ's tensors, against the converter of compressed-tensors, which has an unpacker of its own."""

from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file

from baton.errors import ModelError
from baton.modeling.families.checkpoint import Checkpoint
from baton.modeling.quantized.awq import AwqFormat
from tests.support.models.quantised import awq

N, K = 40, 96


@pytest.mark.parametrize("group_size", [32, 96])
def test_weight_equals_that_of_the_autoawq_converter(group_size: int, tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(group_size)
    num_groups = K // group_size
    tensors = {
        "m.qweight": torch.randint(-(2**31), 2**31, (K, N // 8), dtype=torch.int32, generator=random),
        "m.qzeros": torch.randint(-(2**31), 2**31, (num_groups, N // 8), dtype=torch.int32, generator=random),
        "m.scales": torch.rand(num_groups, N, generator=random),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    mine = Checkpoint(tmp_path, torch.float32, "cpu", weight_format=AwqFormat(group_size)).take("m.weight", (N, K))
    converted = AutoAWQConverter(group_size=group_size).process(dict(tensors))
    args = QuantizationArgs(num_bits=4, symmetric=False, strategy="group", group_size=group_size)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    parts = {name.removeprefix("m."): tensor for name, tensor in converted.items()}
    assert torch.equal(mine, PackedQuantizationCompressor.decompress(parts, scheme)["weight"])


def test_outputs_that_fill_no_whole_word_are_refused(tmp_path: Path) -> None:
    made = awq(N, K, 1)
    save_file({f"m.{part}": tensor for part, tensor in made.tensors.items()}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path, torch.float32, "cpu", weight_format=AwqFormat(None))
    with pytest.raises(ModelError, match=r"m.scales has shape \[1, 40\], config.json asks for \[1, 36\]"):
        checkpoint.take("m.weight", (36, K))
