"""Tells which kind of processor this is, from /proc/cpuinfo; needs no torch."""

import functools
import hashlib
import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_IDENTITY = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
_FLAGS = ("flags", "Features")
"""Names that x86 and ARM give to the list of features."""


@functools.cache
def cpu_flags() -> tuple[str, ...]:
    """Return the features of the first core, as /proc/cpuinfo names them; none where there is no such file."""
    return tuple(next((value for name, value in _fields() if name in _FLAGS), "").split())


@functools.cache
def processor_kind() -> str:
    """Return the processor's name and a hash of its family, model and features: all that kernels depend on."""
    fields = dict(_fields())
    name = fields.get("model name") or platform.processor() or platform.machine()
    identity = [fields.get(each, "") for each in _IDENTITY] + sorted(cpu_flags())
    return f"{name} [{hashlib.blake2b(' '.join(identity).encode(), digest_size=3).hexdigest()}]"


def _fields() -> list[tuple[str, str]]:
    """Return names and values of the fields of the first core; none where there is no such file."""
    if not _CPUINFO.exists():
        return []
    first = _CPUINFO.read_text().split("\n\n", 1)[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return [(name.strip(), value.strip()) for name, _, value in pairs]
