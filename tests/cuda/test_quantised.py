"""Quantised checkpoints on a device give the logits of the plain weights that they stand for, on the CPU."""

from pathlib import Path

import pytest
import torch

from baton.errors import ModelError
from baton.modeling.checkpoints.weights import load_decoder
from baton.modeling.device.port import Device
from baton.modeling.forward.attention import plain_kernel
from baton.modeling.forward.decoder import Decoder
from baton.modeling.kv.buffers import BufferSpan
from baton.types import TokenRange
from tests.support.models.quantised_folders import VOCAB, write_pair

IDS = [token % VOCAB for token in range(5, 60, 3)]
FORMATS = ["gptq_act_order", "awq_groups_of_64", "packed_int4", "int8_channel", "float_channel", "fp8_blocks"]


@torch.inference_mode()
def logits(decoder: Decoder) -> torch.Tensor:
    tokens = TokenRange(0, len(IDS))
    buffer = decoder.device.buffer(decoder.layout, tokens)
    return decoder.logits(decoder.forward(IDS, [BufferSpan(buffer, tokens)])).cpu()


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_plain_weights(device: Device, tmp_path: Path, name: str) -> None:
    pair = write_pair(tmp_path, name)
    there = load_decoder(pair.quantised, device=device)
    if device.name == "cuda":
        there = Decoder(there.config, there.weights, plain_kernel, device=device)
    assert there.weights.head.weight().device == device.torch_device
    expected = logits(load_decoder(pair.plain))
    assert float((logits(there) - expected).abs().max() / expected.abs().max()) <= 2e-5


@pytest.mark.gpu
def test_rounding_to_int8_is_refused_in_one_line(device: Device, tmp_path: Path) -> None:
    pair = write_pair(tmp_path, "awq")
    with pytest.raises(ModelError, match="weights int8 are not supported for torch.bfloat16 on cuda"):
        load_decoder(pair.plain, device=device, dtype="bfloat16", weights="int8")
