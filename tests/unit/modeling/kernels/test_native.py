"""Kernels are loaded once, whatever becomes of the folder they came from."""

from pathlib import Path

import pytest

from modeling.kernels import native
from tests.support.kernels.paths import require


def test_a_kernel_is_loaded_once_however_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("rotary", native.NATIVE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.load("rotary") and native.load("rotary", native.NATIVE)
    assert native.load(name="rotary", instruction_set=native.NATIVE)
    assert not [*tmp_path.iterdir()], "nothing is built again"
