"""The kernels compiled before a GPU's first prompt are those that prompts of all lengths need."""

import itertools

import pytest
import torch
from torch import Tensor

from baton.modeling.kernels.triton import prefill
from baton.modeling.kernels.triton.prefill import QUERIES, Visibility, compile_prefills, prefill_attention
from baton.modeling.kernels.triton.tiles import prefill_tiles
from tests.support.kernels.triton.process import HAS_TRITON, process_with

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("shared_bytes", [None, 99 * 1024, 227 * 1024])
def test_few_sizes_stand_for_all(dtype: torch.dtype, head_dim: int, shared_bytes: int | None) -> None:
    compiled = {prefill_tiles(head_dim, dtype, num_queries, shared_bytes) for num_queries in QUERIES}
    assert {prefill_tiles(head_dim, dtype, num_queries, shared_bytes) for num_queries in range(1, 3000)} == compiled


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_each_is_run_once() -> None:
    with process_with(TRITON_INTERPRET="1") as run:
        run(_compile)


def _compile() -> None:
    """In a process of its own, which may replace what it likes."""
    launched = []

    def attend(q_TNH: Tensor, k_SGH: Tensor, v_SGH: Tensor, seen: Visibility) -> tuple[Tensor, Tensor]:
        launched.append((len(q_TNH), seen.is_causal, seen.mask_TS is not None))
        return prefill_attention(q_TNH, k_SGH, v_SGH, seen)

    prefill.prefill_attention = attend  # type: ignore[assignment]
    compile_prefills((2, 1, 16), torch.float32, torch.device("cpu"), with_masks=True)
    assert sorted(launched) == sorted(itertools.product(QUERIES, (False, True), (False, True)))
