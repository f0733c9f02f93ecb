"""Fixtures of unit tests in more than one folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.config.environment import SECRET_VARIABLE
from tests.support.wire.commands import Baton
from tests.support.wire.secret import SECRET


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder in memory for prefix blocks, as a node's is."""
    from tests.support.engines.prefixes import prefix_folder

    with prefix_folder() as made:
        yield made


@pytest.fixture
def baton(capsys: pytest.CaptureFixture[str]) -> Baton:
    return Baton(capsys)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands know the secret of clusters that they are given the address of."""
    monkeypatch.setenv(SECRET_VARIABLE, SECRET.text)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the user's caches."""
    made = tmp_path / "cache"
    made.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(made))
    return made
