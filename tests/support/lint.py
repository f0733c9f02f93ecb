"""A copy of the source tree in which a test can introduce a violation, and the steps of `make lint` to run on it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.folders import ROOT

BIN = Path(sys.executable).parent

STEPS = {
    "imports": ("lint-imports", "--no-logo"),
    "sizes": ("python", "tools/check_sizes.py"),
    "prose": ("python", "tools/check_prose.py"),
    "stubs": ("python", "tools/protos.py", "--check"),
}
"""Steps with rules of the project, as the Makefile runs them from .venv/bin."""

_COPIED = {".py", ".pyi", ".proto", ".toml", ".md", ".tsv"}
_SKIPPED = {"build", "dist", "__pycache__"}


def copy_tree(target: Path) -> Path:
    """Copy the files that the lint steps read to `target`, and return `target`."""
    for folder, names, files in os.walk(ROOT):
        names[:] = [name for name in names if not name.startswith(".") and name not in _SKIPPED]
        for name in files:
            source = Path(folder, name)
            if source.suffix in _COPIED:
                place = target / source.relative_to(ROOT)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, place)
    return target


def run_step(step: str, root: Path) -> subprocess.CompletedProcess[str]:
    """Run a step in `root`. A nonzero exit status raises no error. Standard output and standard error are combined, and
    lines are not wrapped."""
    command, *arguments = STEPS[step]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "400"}
    return subprocess.run(
        [BIN / command, *arguments],
        cwd=root,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=100,
        check=False,
    )
