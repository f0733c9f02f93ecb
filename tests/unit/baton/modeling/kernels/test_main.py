"""Measuring kernels keeps the choice among them, and tells of kernels that are not there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.modeling.kernels import native

pytestmark = pytest.mark.integration


def test_the_choice_is_kept_and_told(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "baton.modeling.kernels"]
    run = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=300)
    assert run.returncode == (0 if native.load() else 1)
    assert (native.chosen_set() or "none is built") in run.stdout
    assert len([*(tmp_path / "baton" / "kernels").glob("choice-*.json")]) == native.load()
