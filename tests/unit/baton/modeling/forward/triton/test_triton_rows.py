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


@pytest.mark.parametrize("window", [None, 40])
def test_a_decoder_runs_its_spans_by_them(interpreter: Run, window: int | None) -> None:
    interpreter(paged_rows.check_forward, window)


def test_rows_are_compiled_for_gpus_only() -> None:
    assert not compiles_for(CPU, torch.float32)
