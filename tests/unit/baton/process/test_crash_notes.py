"""A crash note tells what a process was computing when it crashed, and nothing of a process that was killed."""

import logging
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from baton.process import crash_notes
from baton.process.crash_notes import ComputedNow, begin_note, end_note, fingerprint, read_crash

pytestmark = pytest.mark.integration

NAMES = (fingerprint("a", (1, 2)), fingerprint("b", (1, 2)))
COMPUTING = tuple(sorted(name.hex() for name in NAMES))
_CHILD = """
import os, sys, threading
from pathlib import Path
from baton.process.crash_notes import ComputedNow, begin_note, end_note, fingerprint
NAMES = (fingerprint("a", (1, 2)), fingerprint("b", (1, 2)))
note = begin_note(Path(sys.argv[1]))
now = ComputedNow(note)
now.set(NAMES)
{then}
"""
_ABORT = "thread = threading.Thread(target=os.abort); thread.start(); thread.join()"


def end_as(folder: Path, then: str) -> Path:
    """Let a process with a note run that code, and return its note; where it left none, where it would be."""
    subprocess.run([sys.executable, "-c", _CHILD.format(then=then), folder], stderr=subprocess.DEVNULL, check=False)
    return next(folder.iterdir(), folder / "none")


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL"])
def test_a_crash_tells_what_was_computed_and_its_trace(tmp_path: Path, name: str) -> None:
    path = end_as(tmp_path, f"os.kill(os.getpid(), {int(getattr(signal, name))})")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    crash = read_crash(str(path))
    assert crash is not None
    assert crash.computing == COMPUTING
    assert "most recent call first" in crash.trace
    assert not path.exists()
    assert read_crash(str(path)) is None


@pytest.mark.parametrize(
    ("then", "computing"),
    [(_ABORT, COMPUTING), ("now.set(());" + _ABORT, ()), ("now.set(NAMES[:1]);" + _ABORT, (NAMES[0].hex(),))],
)
def test_only_what_was_computed_last_is_told(tmp_path: Path, then: str, computing: tuple[str, ...]) -> None:
    crash = read_crash(str(end_as(tmp_path, then)))
    assert crash is not None and crash.computing == computing


@pytest.mark.parametrize("then", [f"os.kill(os.getpid(), {int(signal.SIGKILL)})", "os._exit(1)", "end_note(note)"])
def test_a_process_that_does_not_crash_tells_nothing(tmp_path: Path, then: str) -> None:
    assert read_crash(str(end_as(tmp_path, then))) is None
    assert not list(tmp_path.iterdir())


def test_a_process_without_a_note_has_none_to_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert not begin_note(tmp_path / "absent")
    assert "no crash note" in caplog.text
    ComputedNow("").set(NAMES)
    end_note("")
    assert read_crash("") is None


def test_notes_that_no_supervisor_has_read_are_swept_and_others_are_not(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    unread, fresh = end_as(tmp_path / "one", _ABORT), end_as(tmp_path / "other", _ABORT)
    paths = [path.rename(tmp_path / path.name) for path in (unread, fresh)]
    os.utime(paths[0], (0, 0))
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD.format(then="print(note, flush=True); input()"), tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as living:
        assert living.stdin is not None and living.stdout is not None
        note = Path(living.stdout.readline().strip())
        os.utime(note, (0, 0))
        crash_notes._sweep(tmp_path)
        assert not paths[0].exists()
        assert paths[1].exists() and note.exists()
        living.stdin.write("\n")


def test_attempts_of_a_request_and_its_choices_have_one_fingerprint() -> None:
    assert fingerprint("r/3", [1, 2]) == fingerprint("r", (1, 2)) == fingerprint("r", [1, 2])
    assert (
        len({fingerprint("r", (1, 2)), fingerprint("r", (1, 3)), fingerprint("q", (1, 2)), fingerprint("r/a", (1, 2))})
        == 4
    )
