"""Memory of the machine or container in which the process runs: its size, and the free part."""

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Return the number of bytes of memory that processes can still allocate: the machine's available memory, or the
    unused part of the container's limit if that is less. Cached file pages count as free, because the kernel drops them
    when memory is needed."""
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit = cgroup / "memory.max"
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        of_files = int(stat["inactive_file"]) + int(stat["active_file"])
        free = min(free, int(text) - int((cgroup / "memory.current").read_text()) + of_files)
    return max(free, 0)


def memory_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Return the number of bytes of memory that the machine has, or the container's limit if that is less."""
    total = int(meminfo.read_text().partition("MemTotal:")[2].split()[0]) * 1024
    text = limit.read_text().strip() if (limit := cgroup / "memory.max").exists() else "max"
    return total if text == "max" else min(total, int(text))
