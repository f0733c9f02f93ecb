"""Operations whose rates are measured do what their numbers say."""

import pytest
import torch

from baton.modeling.device.cpu import CpuDevice
from baton.planning.model_shape import ModelShape
from deploy.machine.prefill_rates import CPU, decode_work, launch_work
from tests.support.kernels.triton.process import HAS_TRITON, Run

pytestmark = pytest.mark.integration

SHAPE = ModelShape(3, 64, 4, 2, 32, ffn=64, vocab=64)


def test_launches_are_counted_by_layers_of_a_decoder_that_prefills() -> None:
    call, num_layers = launch_work(SHAPE, 5, "float32", CpuDevice())
    with torch.inference_mode():
        hidden = call()
    assert num_layers == 3
    assert isinstance(hidden, torch.Tensor) and hidden.shape == (5, 64) and bool(hidden.isfinite().all())


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_decode_attention_reads_all_keys_each_time(interpreter: Run) -> None:
    interpreter(_check_decode)


def _check_decode() -> None:
    call, num_bytes = decode_work(SHAPE, (2, 100), torch.float32, CPU)
    outputs = call()
    assert isinstance(outputs, list)
    assert num_bytes == len(outputs) * 2 * 128 * 2 * 2 * 32 * 4, "whole pages of 64 tokens"
    assert outputs[0].shape == (2, 4, 32) and bool(outputs[0].any()) and torch.equal(outputs[0], outputs[-1])
