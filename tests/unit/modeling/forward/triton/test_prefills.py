"""What is compiled before a GPU's first prompt is what prompts of all lengths need."""

import pytest
import torch

from modeling.kernels.triton.prefill import QUERIES, compile_prefills
from modeling.kernels.triton.tiles import prefill_tiles
from tests.support.kernels.triton.process import HAS_TRITON, process_with


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("shared_bytes", [None, 99 * 1024, 227 * 1024])
def test_few_sizes_stand_for_all(dtype: torch.dtype, head_dim: int, shared_bytes: int | None) -> None:
    compiled = {prefill_tiles(head_dim, dtype, num_queries, shared_bytes) for num_queries in QUERIES}
    assert {prefill_tiles(head_dim, dtype, num_queries, shared_bytes) for num_queries in range(1, 3000)} == compiled


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_all_are_run_once() -> None:
    with process_with(TRITON_INTERPRET="1") as run:
        run(_compile)


def _compile() -> None:
    compile_prefills(2, 1, 16, torch.float32, torch.device("cpu"), with_masks=True)
