"""The tools without which some tests are skipped: where every test has to run, they have to be there. Left out are
redis-server, because no package index has it, without which a restart of Ray's head is not tested; and vllm, aiperf and
guidellm, load generators that need environments of their own."""

import importlib.util
import shutil
import sys
from pathlib import Path

_COMMANDS = ("chromium", "git", "hadolint", "make", "prometheus", "promtool")
_MODULES = ("check_jsonschema", "kubernetes_validate", "matplotlib", "playwright", "ray", "scipy", "triton")


def find_command(name: str) -> str | None:
    """Return the path of a command: one that was installed beside this Python, or on the path; None without one."""
    beside = shutil.which(name, path=str(Path(sys.executable).parent))
    return beside or shutil.which(name)


def missing() -> list[str]:
    """Return what is missing of all that tests use."""
    lacking = [command for command in _COMMANDS if find_command(command) is None]
    lacking += [f"the Python package {name}" for name in _MODULES if importlib.util.find_spec(name) is None]
    if shutil.which("c++") is None:
        lacking.append("a C++ compiler")
    if not Path("/dev/shm").is_dir():
        lacking.append("/dev/shm")
    return lacking
