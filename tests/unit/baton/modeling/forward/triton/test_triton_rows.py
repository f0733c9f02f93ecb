"""The decoder's caller of Triton's decode attention, in Triton's interpreter: the results of the kernels in C++."""

import pytest
import torch

from baton.modeling.forward.decode_rows import has_native_rows
from baton.modeling.kernels.triton.launch import compiles_for
from baton.types import TokenRange
from tests.support.kernels.triton import paged_rows
from tests.support.kernels.triton.process import HAS_TRITON, Run

CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        not HAS_TRITON or not has_native_rows(CPU, torch.float32, 32), reason="needs Triton and a C++ compiler"
    ),
]


@pytest.mark.parametrize(
    ("num_new", "page_tokens", "window", "unseen"),
    [(1, 64, None, None), (1, 16, 40, None), (4, 16, None, TokenRange(1, 5)), (8, 64, None, None)],
)
def test_rows_are_those_of_the_kernels_for_cpus(
    interpreter: Run, num_new: int, page_tokens: int, window: int | None, unseen: TokenRange | None
) -> None:
    arguments = {"has_picks": num_new == 1, "in_order": num_new > 1}
    interpreter(_check, num_new, page_tokens, window, unseen, arguments)


def _check(
    num_new: int, page_tokens: int, window: int | None, unseen: TokenRange | None, arguments: dict[str, bool]
) -> None:
    paged_rows.check_rows(num_new, page_tokens, window, unseen, **arguments)


def test_a_decoder_runs_its_rows_by_them(interpreter: Run) -> None:
    interpreter(paged_rows.check_forward)


def test_kernels_are_compiled_without_a_trace(interpreter: Run) -> None:
    interpreter(paged_rows.check_compiling)


def test_few_kernels_serve_steps_of_all_sizes() -> None:
    """Another `most_queries`, or another kind of stride of the table, is a kernel that is compiled while rows wait."""
    compiled = set()
    for num_new in range(1, 9):
        for length in range(num_new, 600, 37):
            rows = paged_rows.step_rows(num_new, (num_new, length))
            assert rows.most_queries >= num_new and rows.table_BC.shape[1] * paged_rows.PAGE_TOKENS >= length
            compiled.add((rows.most_queries, rows.table_BC.stride(0) % 16))
    assert compiled == {(1, 0), (2, 0), (4, 0), (8, 0)}


def test_rows_are_compiled_for_gpus_only() -> None:
    assert not compiles_for(CPU, torch.float32)
