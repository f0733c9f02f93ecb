"""Files that appear whole: what a reader sees while one is written, after a failure, and after a killed writer."""

import os
from pathlib import Path

import pytest

from baton.process.whole_files import whole


def test_a_file_takes_the_place_of_the_former_one_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    path.write_text("former")
    with whole(path) as partial:
        partial.write_text("present")
        assert path.read_text() == "former"
    assert path.read_text() == "present"
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_is_left_of_a_failed_write(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        with whole(path) as partial:
            partial.write_text("half")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail(tmp_path / "kept.json")
    assert not list(tmp_path.iterdir())


def test_what_killed_writers_left_goes_and_what_is_being_written_stays(tmp_path: Path) -> None:
    left, other = tmp_path / "kept.json.1.partial", tmp_path / "else.json.1.partial"
    for path in (left, other):
        path.write_text("half")
        os.utime(path, (0, 0))
    with whole(tmp_path / "kept.json") as running:
        running.write_text("half")
        with whole(tmp_path / "kept.json") as partial:
            partial.write_text("whole")
        assert running.exists()
    assert sorted(tmp_path.iterdir()) == [other, tmp_path / "kept.json"]
