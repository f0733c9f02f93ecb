"""Tools without which some tests are skipped. They must be installed where every test has to run. Not listed are
redis-server, which no package index offers (without it, a restart of Ray's head is not tested), and the load generators
vllm, aiperf and guidellm, which need separate environments."""

import importlib.util
import shutil
import socket
import sys
from pathlib import Path

_COMMANDS = ("chromium", "git", "hadolint", "make", "prometheus", "promtool")
_MODULES = ("check_jsonschema", "kubernetes_validate", "matplotlib", "playwright", "ray", "scipy", "triton")


def find_command(name: str) -> str | None:
    """Return the path of a command that is installed next to this Python or on PATH; None if there is none."""
    beside = shutil.which(name, path=str(Path(sys.executable).parent))
    return beside or shutil.which(name)


def missing() -> list[str]:
    """Return the names of all missing tools."""
    lacking = [command for command in _COMMANDS if find_command(command) is None]
    lacking += [f"the Python package {name}" for name in _MODULES if importlib.util.find_spec(name) is None]
    if shutil.which("c++") is None:
        lacking.append("a C++ compiler")
    if not Path("/dev/shm").is_dir():
        lacking.append("/dev/shm")
    return lacking


def has_ipv6() -> bool:
    """Return whether this machine has the IPv6 loopback address."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True
