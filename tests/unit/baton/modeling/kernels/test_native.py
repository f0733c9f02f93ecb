"""A process uses the best kernels that are built and that its processor has; a launcher asks for them without torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from baton.modeling.kernels import native
from baton.modeling.kernels.instruction_sets import GENERIC, SETS, WHEEL_SETS

pytestmark = pytest.mark.integration


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of libraries in which there are none yet, on a processor that has every instruction."""
    monkeypatch.setattr(native, "_BUILT", tmp_path)
    monkeypatch.setattr(native, "_folder", lambda: tmp_path)
    monkeypatch.setattr(native, "usable_sets", lambda: tuple(SETS.values()))
    return tmp_path


def leave(instruction_set: str) -> None:
    """Leave the files that a build for that set would leave."""
    for folder in native.FOLDERS:
        native.library_path(folder, instruction_set).write_text(instruction_set)


def test_the_best_of_the_sets_that_are_built_is_used(built: Path) -> None:
    assert native.chosen_set() is None
    for each in reversed(SETS.values()):
        leave(each.name)
        assert native.chosen_set() == each.name
    native.library_path("linear", WHEEL_SETS[0].name).unlink()
    assert native.chosen_set() == WHEEL_SETS[1].name, "a set is used whole"


def test_a_processor_gets_what_it_has(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETS:
        leave(name)
    monkeypatch.setattr(native, "usable_sets", lambda: (SETS["x86-64-v3"], GENERIC))
    assert native.chosen_set() == "x86-64-v3"
    assert "amx_tile" in native.lacking("x86-64-v4-amx")
    assert not native.lacking("x86-64-v3")


def test_a_choice_is_of_one_build_torch_and_processor(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(GENERIC.name)
    paths = [native.choice_path()]
    native.library_path("linear", GENERIC.name).write_text("another build")
    paths.append(native.choice_path())
    with monkeypatch.context() as patch:
        patch.setattr("importlib.metadata.version", lambda _: "another")
        paths.append(native.choice_path())
    monkeypatch.setattr(native, "processor_kind", lambda: "another")
    paths.append(native.choice_path())
    assert len(set(paths)) == len(paths)


def test_kernels_are_measured_where_they_and_torch_are(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not native.may_need_measuring()
    leave(GENERIC.name)
    assert native.may_need_measuring()
    with monkeypatch.context() as patch:
        patch.setattr("importlib.metadata.distributions", lambda **_: iter(()))
        assert not native.may_need_measuring()
    native.choice_path().touch()
    assert not native.may_need_measuring()


def test_a_launcher_asks_without_torch() -> None:
    code = "import sys, baton.modeling.kernels.native as n; n.may_need_measuring(); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=60, check=True)
    assert run.stdout.strip() == "False"


def test_kernels_that_are_not_built_are_told_of_once(
    built: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    native._operators.cache_clear()
    native._warn.cache_clear()
    try:
        assert not native.load()
        assert not native.load()
        with pytest.raises(OSError, match="torch's operators are used"):
            native.operators()
    finally:
        native._operators.cache_clear()
    assert len(caplog.records) == 1


def test_a_library_that_cannot_be_loaded_is_told_of(built: Path, caplog: pytest.LogCaptureFixture) -> None:
    leave(GENERIC.name)
    native._operators.cache_clear()
    try:
        assert not native.load(GENERIC.name)
    finally:
        native._operators.cache_clear()
    assert "generic.so" in caplog.text
