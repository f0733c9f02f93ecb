"""The golden lane computes whole models, and nothing runs beside it: it may have all cores."""

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def all_cores() -> Iterator[None]:
    """Undoes the one thread that tests otherwise compute with."""
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    yield
    torch.set_num_threads(before)
