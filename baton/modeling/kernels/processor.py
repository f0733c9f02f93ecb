"""Identifies the type of this processor from /proc/cpuinfo. Imports only the standard library."""

import functools
import hashlib
import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_IDENTITY = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
_FLAGS = ("flags", "Features")
"""Names of the line with processor features in /proc/cpuinfo: "flags" on x86, "Features" on ARM."""


@functools.cache
def cpu_flags() -> tuple[str, ...]:
    """Return the features of the first core, named as in /proc/cpuinfo. Empty if /proc/cpuinfo does not exist."""
    return tuple(next((value for name, value in _fields() if name in _FLAGS), "").split())


@functools.cache
def processor_kind() -> str:
    """Return a string that identifies the type of this processor: its name, and a hash of its family, model and
    features. The choice of kernels depends on it."""
    fields = dict(_fields())
    identity = [fields.get(each, "") for each in _IDENTITY] + sorted(cpu_flags())
    return f"{processor_name()} [{hashlib.blake2b(' '.join(identity).encode(), digest_size=3).hexdigest()}]"


def processor_name() -> str:
    """Return the processor's name as the kernel gives it."""
    return dict(_fields()).get("model name") or platform.processor() or platform.machine()


def _fields() -> list[tuple[str, str]]:
    """Return names and values of the fields of the first core. Empty if the file does not exist."""
    if not _CPUINFO.exists():
        return []
    first = _CPUINFO.read_text().split("\n\n", 1)[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return [(name.strip(), value.strip()) for name, _, value in pairs]
