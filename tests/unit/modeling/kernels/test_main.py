"""Preparing kernels says which of them cannot be built, and why."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from modeling.kernels import native

pytestmark = pytest.mark.integration


def test_a_compiler_that_fails_is_told(tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'error: too old' >&2\nexit 1\n")
    compiler.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-m", "modeling.kernels"], env=environment, text=True, capture_output=True, timeout=100
    )
    assert run.returncode == 1
    assert all(f"kernel {name} cannot be built" in run.stderr for name in native.NAMES)
    assert "error: too old" in run.stderr.strip().splitlines()[-1]
    assert not list((tmp_path / "baton" / "kernels").glob("choice-*.json"))
