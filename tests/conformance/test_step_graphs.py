"""Steps over KV in pages choose the tokens of the CPU: in Triton's interpreter where there is no GPU."""

from collections.abc import Iterator

import pytest

from tests.support.kernels.triton import steps
from tests.support.kernels.triton.process import HAS_TRITON, Run, process_with

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with process_with(TRITON_INTERPRET="1") as run:
        yield run


@pytest.mark.parametrize("window", [None, pytest.param(9, marks=pytest.mark.ci)])
def test_rows_of_a_step_get_the_tokens_of_the_cpu(run: Run, window: int | None) -> None:
    run(check_on_cpu, window)


def check_on_cpu(window: int | None) -> None:
    steps.check_steps(window=window)
