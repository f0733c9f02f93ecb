"""Fixtures of unit tests in more than one folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder in memory for prefix blocks, as a node's is."""
    from tests.support.engines.prefixes import prefix_folder

    with prefix_folder() as made:
        yield made
