"""Folders in memory, each of which stands for a node's prefix store."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engines.prefixes import prefix_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    with prefix_folder() as made:
        yield made


@pytest.fixture
def other_folder() -> Iterator[Path]:
    with prefix_folder() as made:
        yield made
