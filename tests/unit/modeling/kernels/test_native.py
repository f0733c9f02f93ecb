"""Kernels are loaded once; whether they have to be built is known from files that earlier uses left, without torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from modeling.kernels import native
from tests.support.kernels.paths import require

pytestmark = pytest.mark.integration


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where kernels are kept: nothing yet, and there is a compiler."""
    monkeypatch.setattr(native, "_folder", lambda: tmp_path)
    monkeypatch.setattr(native, "find_compiler", lambda: "/usr/bin/c++")
    return tmp_path


def leave(instruction_set: str) -> None:
    """What a use of all kernels would: they, and the choice among them."""
    native.choice_path().touch()
    for name in native.NAMES:
        native._place(name, native._flags(instruction_set)).touch()


def test_only_these_kernels_for_this_processor_count_as_built(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in native.NAMES:
        (folder / f"{name}-0123456789abcdef.so").touch()
    leave("avx2")
    assert native.may_need_building()
    leave(native.NATIVE)
    assert not native.may_need_building()
    monkeypatch.setattr("importlib.metadata.version", lambda _: "another")
    assert native.may_need_building()


def test_without_a_choice_among_them_kernels_are_measured(folder: Path) -> None:
    leave(native.NATIVE)
    native.choice_path().unlink()
    assert native.may_need_building()


def test_nothing_is_built_without_a_compiler_or_torch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.may_need_building()
    with monkeypatch.context() as patch:
        patch.setattr("importlib.metadata.distributions", lambda **_: iter(()))
        assert not native.may_need_building()
    monkeypatch.setattr(native, "find_compiler", lambda: None)
    assert not native.may_need_building()


def test_a_launcher_asks_without_torch() -> None:
    code = "import sys; from modeling.kernels import native; native.may_need_building(); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=60, check=True)
    assert run.stdout.strip() == "False"


def test_a_kernel_is_loaded_once_however_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("rotary", native.NATIVE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.load("rotary") and native.load("rotary", native.NATIVE)
    assert native.load(name="rotary", instruction_set=native.NATIVE)
    assert not [*tmp_path.iterdir()], "nothing is built again"
