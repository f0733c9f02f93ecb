"""A cluster is found again by its record, and what a killed launcher left by the files that it holds open."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import ConfigError
from deploy.commands.record import ClusterRecord, kill_ray, load_record, process_start, record_path

pytestmark = pytest.mark.integration

HOLD = "import sys; file = open(sys.argv[1], 'w'); print('open', flush=True); sys.stdin.read()"


@pytest.fixture
def record(cache: Path, tmp_path: Path) -> ClusterRecord:
    folder = tmp_path / "ray"
    folder.mkdir()
    return ClusterRecord("mine", os.getpid(), process_start(os.getpid()), "127.0.0.1:1", str(folder))


def test_a_record_is_read_back_and_removed_with_its_folder(record: ClusterRecord) -> None:
    record.save()
    assert load_record("mine") == record
    record.remove()
    assert load_record("mine") is None
    assert not Path(record.ray_folder).exists()
    record.remove()


def test_a_later_save_replaces_the_record(record: ClusterRecord) -> None:
    record.save()
    replace(record, endpoint="127.0.0.1:2", http="http://127.0.0.1:3").save()
    loaded = load_record("mine")
    assert loaded is not None
    assert loaded.endpoint == "127.0.0.1:2"
    assert [path.name for path in record_path("mine").parent.iterdir()] == ["mine.json"]


def test_a_damaged_record_is_named(record: ClusterRecord) -> None:
    record.save()
    record_path("mine").write_text("{}")
    with pytest.raises(ConfigError, match="mine.json is damaged .*: remove it"):
        load_record("mine")


def test_a_reused_process_id_is_another_launcher(record: ClusterRecord) -> None:
    assert record.launcher_lives
    assert not replace(record, launcher_started="1").launcher_lives


def test_an_ended_process_has_no_start() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    assert process_start(child.pid) == ""


@pytest.mark.parametrize("doomed", ["worker", "script"])
def test_processes_of_that_ray_are_killed_and_nothing_else(doomed: str, record: ClusterRecord, tmp_path: Path) -> None:
    ours, other = Path(record.ray_folder) / "log", tmp_path / "ray-of-another"
    script = tmp_path / "site-packages" / "ray" / "agent.py"
    script.parent.mkdir(parents=True)
    script.write_text(HOLD)
    worker, pager = ["ray::Worker", "-c", HOLD], [sys.executable, "-c", HOLD]
    with ExitStack() as stack:
        spared = [stack.enter_context(holding(command, path)) for command, path in ((worker, other), (pager, ours))]
        command = worker if doomed == "worker" else [sys.executable, "-u", str(script)]
        ended = stack.enter_context(holding(command, ours))
        assert kill_ray(record.ray_folder) == 1
        assert ended.wait() == -9
        assert [each.poll() for each in spared] == [None, None]


@contextmanager
def holding(command: list[str], path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process with this command line that has the file open."""
    given = [*command, str(path)]
    with subprocess.Popen(
        given, executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        yield process
