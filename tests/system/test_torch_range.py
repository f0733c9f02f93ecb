"""The oldest torch that the package permits passes the tests of the code that uses torch. All other tests use the
pinned torch."""

import os
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from tests.support.folders import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.nightly, pytest.mark.timeout(3000)]

TESTED = ("golden", "conformance", "unit/baton/modeling", "unit/generate_workers", "unit/prefill_workers")
FREE = ("torch==", "triton==", "setuptools==")
"""Packages whose versions follow from that of torch."""


def test_the_oldest_torch_passes(tmp_path: Path) -> None:
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["serve"]
    (oldest,) = [each.partition(">=")[2] for each in required if each.startswith("torch>=")]
    pinned = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("".join(line for line in pinned if not line.startswith(FREE)))
    python = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    install = ("-m", "pip", "--python", python, "install", "--quiet", "--no-compile", "-c", constraints)
    run(sys.executable, *install, f"torch=={oldest}.*")
    (packages,) = (tmp_path / "venv" / "lib").glob("python3*/site-packages")
    rest = sysconfig.get_path("purelib")  # all other packages are those of this environment
    (packages / "rest.pth").write_text(f"import site; site.addsitedir({rest!r})\n")
    assert run(python, "-c", "import torch; print(torch.__version__)").startswith(f"{oldest}.")
    folders = [ROOT / "tests" / each for each in TESTED]
    run(python, "-m", "pytest", "-q", "-x", "--lane", "unit", "-p", "no:cacheprovider", *folders)


def run(program: str | Path, *arguments: str | Path) -> str:
    """Run a command that must succeed, and return its output."""
    done = subprocess.run([program, *arguments], cwd=ROOT, env=os.environ, text=True, capture_output=True)
    assert done.returncode == 0, f"{program} {' '.join(map(str, arguments))}: {(done.stdout + done.stderr)[-4000:]}"
    return done.stdout
