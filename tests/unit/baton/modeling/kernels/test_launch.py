"""Compilations of Triton kernels are counted by Triton's own hook, which is called here as Triton would call it."""

import pytest
import torch

from baton.modeling.kernels.triton.launch import num_compiled


def test_compiled_kernels_are_counted_on_a_gpu_only() -> None:
    triton = pytest.importorskip("triton")
    gpu = torch.device("cuda")
    before = num_compiled(gpu)
    triton.knobs.runtime.jit_post_compile_hook(key="k", repr="r", fn=None, compile={}, already_compiled=False)
    assert num_compiled(gpu) == before + 1
    assert num_compiled(torch.device("cpu")) == 0
