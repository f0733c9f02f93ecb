"""Triton's compiler takes the kernels of attention and sampling for NVIDIA's architecture 9.0, without a GPU: what the
interpreter runs (test_triton_kernels.py) is also what compiles. Nothing is launched.
"""

from collections.abc import Iterator

import pytest
import torch

from tests.support.kernels.triton import compiling
from tests.support.kernels.triton.process import HAS_TRITON, Run, process_with

SHARED_BYTES = 99 * 1024
"""Shared memory of a program on the least of NVIDIA's GPUs since architecture 8.0."""
H100_SHARED_BYTES = 227 * 1024
"""Shared memory of a program on an H100."""

pytestmark = [pytest.mark.integration, pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with process_with(TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton"))) as run:
        yield run


@pytest.mark.parametrize(
    ("dtype", "head_dim", "group", "most_queries"),
    [
        pytest.param(torch.bfloat16, 128, 4, 4, id="bfloat16-128"),
        pytest.param(torch.float16, 80, 1, 1, id="float16-80", marks=pytest.mark.ci),
        pytest.param(torch.bfloat16, 256, 16, 8, id="bfloat16-256", marks=pytest.mark.ci),
        pytest.param(torch.float32, 96, 3, 1, id="float32-96", marks=pytest.mark.ci),
        pytest.param(torch.float32, 192, 8, 8, id="float32-192", marks=pytest.mark.ci),
    ],
)
def test_every_kernel_compiles_and_fits(
    run: Run, dtype: torch.dtype, head_dim: int, group: int, most_queries: int
) -> None:
    found = run(compiling.compiled, dtype, head_dim, group, most_queries)
    kernels = [each.name for each in found]
    others = ["append_token", "attend_span", "copy_pairs", "copy_words", "norm_token", "gate_tile", "turn_heads"]
    assert kernels == ["attend_split", "merge_splits", "attend_split", "attend_block", *others]
    assert all(each.num_cubin_bytes > 0 for each in found)
    assert max(each.shared_bytes for each in found) <= SHARED_BYTES


@pytest.mark.parametrize(
    ("dtype", "head_dim"), [(torch.bfloat16, 128), pytest.param(torch.float16, 64, marks=pytest.mark.nightly)]
)
def test_wide_tiles_take_the_shared_memory_that_they_are_chosen_by(run: Run, dtype: torch.dtype, head_dim: int) -> None:
    found = run(compiling.compiled_wide, dtype, head_dim, H100_SHARED_BYTES)
    assert [each.name for each in found] == ["attend_block", "attend_span"]
    assert max(each.shared_bytes for each in found) <= H100_SHARED_BYTES


@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [
        (torch.bfloat16, 128),
        pytest.param(torch.bfloat16, 256, marks=pytest.mark.ci),
        pytest.param(torch.float32, 128, marks=pytest.mark.ci),
    ],
)
def test_default_tiles_fit_on_small_gpus_with_pages_of_whole_tiles(run: Run, dtype: torch.dtype, head_dim: int) -> None:
    found = run(compiling.compiled_wide, dtype, head_dim, None)
    assert max(each.shared_bytes for each in found) <= SHARED_BYTES, found


@pytest.mark.parametrize("shared_bytes", [None, H100_SHARED_BYTES])
@pytest.mark.parametrize("window", [None, pytest.param(4096, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("head_dim", [128, pytest.param(64, marks=pytest.mark.nightly)])
def test_no_thread_of_attention_spills_registers(
    run: Run, head_dim: int, window: int | None, shared_bytes: int | None
) -> None:
    found = run(compiling.compiled_wide, torch.bfloat16, head_dim, shared_bytes, window)
    found += run(compiling.compiled, torch.bfloat16, head_dim, 4, 1)
    assert [(each.name, each.num_spilled_bytes) for each in found if each.num_spilled_bytes] == []


@pytest.mark.parametrize("vocab_size", [128_256, pytest.param(50_257, marks=pytest.mark.ci)])
def test_the_sampler_compiles_and_spills_no_registers(run: Run, vocab_size: int) -> None:
    found = run(compiling.compiled_sampler, vocab_size)
    drawn, filtered = ["find_largest", "draw_part", "choose_best"], ["find_largest", *["count_keys"] * 5, "draw_part"]
    assert [each.name for each in found] == [*drawn, *filtered, "choose_best"]
    assert [(each.name, each.num_spilled_bytes) for each in found if each.num_spilled_bytes] == []
    assert max(each.shared_bytes for each in found) <= SHARED_BYTES


def test_a_cpu_is_refused_where_nothing_interprets() -> None:
    with process_with(TRITON_INTERPRET="0") as run:  # the driver of the fixture's process stands for a GPU
        assert "use the kernels in C++" in run(compiling.refusal_on_cpu)
