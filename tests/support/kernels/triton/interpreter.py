"""Fixture `interpreter`. It is imported by tests/conftest.py, and loaded as a plug-in by tests/cuda/bare.ini."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.kernels.triton.process import Run


@pytest.fixture(scope="session")
def interpreter() -> Iterator["Run"]:
    """Yield a function that calls functions of a module in a process in which Triton's interpreter runs kernels."""
    from tests.support.kernels.triton.process import process_with

    with process_with(TRITON_INTERPRET="1") as run:
        yield run
