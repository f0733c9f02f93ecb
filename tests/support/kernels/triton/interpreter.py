"""The fixture `interpreter`: tests/conftest.py has it, and tests/cuda/bare.ini names this file as a plug-in."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.kernels.triton.process import Run


@pytest.fixture(scope="session")
def interpreter() -> Iterator["Run"]:
    """A way to call functions of a module in a process where Triton's interpreter runs kernels."""
    from tests.support.kernels.triton.process import process_with

    with process_with(TRITON_INTERPRET="1") as run:
        yield run
