"""The tools without which some tests are skipped: where every test has to run, they have to be there."""

import importlib.util
import shutil
from pathlib import Path

from modeling.kernels.native import find_compiler

_COMMANDS = ("git", "make")
_MODULES = ("matplotlib", "ray", "scipy")


def missing() -> list[str]:
    """Return what is missing of all that tests use."""
    lacking = [command for command in _COMMANDS if shutil.which(command) is None]
    lacking += [f"the Python package {name}" for name in _MODULES if importlib.util.find_spec(name) is None]
    if find_compiler() is None:
        lacking.append("a C++ compiler")
    if not Path("/dev/shm").is_dir():
        lacking.append("/dev/shm")
    return lacking
