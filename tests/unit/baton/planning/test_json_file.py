"""Files are written whole or not at all, by any number of writers."""

from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.planning import json_file


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "taken"
    (path / "inside").mkdir(parents=True)
    with pytest.raises(ConfigError, match="taken: cannot be written"):
        json_file.write(path, "text")
    assert list(tmp_path.iterdir()) == [path]


def test_writers_do_not_disturb_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write_text = tmp_path / "file", Path.write_text

    def interrupted(partial: Path, text: str, **options: str) -> int:
        written = write_text(partial, text, encoding="utf-8")
        if text == "mine":
            json_file.write(path, "theirs")
        return written

    monkeypatch.setattr(Path, "write_text", interrupted)
    json_file.write(path, "mine")
    assert path.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [path]
