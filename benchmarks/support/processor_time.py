"""Processor time of groups of processes, as counted by the kernel. Linux only."""

import contextlib
import os
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

_PROC = Path("/proc")
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
"""Resolution in seconds with which the kernel counts a process's processor time."""

QUIET_SHARE = 0.2
"""Maximum number of cores that processes may use together to count as idle."""
_QUIET_S = 0.25
_MOST_S = 60.0


def used_s(pids: Iterable[int]) -> dict[int, float]:
    """Return the processor time that all threads of each process have used, in seconds. Processes that have ended are
    omitted."""
    found = {pid: _fields(pid) for pid in pids}
    return {pid: (int(each[11]) + int(each[12])) * TICK_S for pid, each in found.items() if each}


def main_threads_used_s(pids: Iterable[int]) -> dict[int, float]:
    """Return the processor time that the main thread of each process has used, in seconds. Processes that have ended
    are omitted."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            found[pid] = int((_PROC / f"{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9
    return found


def share_of_a_core(before: Mapping[int, float], after: Mapping[int, float], seconds: float) -> float:
    """Return the number of cores that the processes used on average over `seconds` seconds. `before` and `after` map
    process ids to processor time in seconds at the start and at the end. Processes that are in only one of them are
    ignored. If the processes used less than one clock tick (`TICK_S`), one tick is assumed, so the result is never
    0."""
    total_s = sum(after[pid] - before[pid] for pid in before.keys() & after.keys())
    return max(total_s, TICK_S) / seconds


def until_quiet(pids: Collection[int]) -> None:
    """Wait until these processes are idle: together they have used at most QUIET_SHARE of a core for a quarter of a
    second. Used before a measurement, because vLLM's worker busy-waits for a second after its last step. Raises
    TimeoutError if the processes are not idle within a minute."""
    limit_s = time.monotonic() + _MOST_S
    before, before_s = used_s(pids), time.monotonic()
    while time.monotonic() < limit_s:
        time.sleep(_QUIET_S)  # noqa: TID251 - the time that is measured
        after, after_s = used_s(pids), time.monotonic()
        if share_of_a_core(before, after, after_s - before_s) <= QUIET_SHARE:
            return
        before, before_s = after, after_s
    raise TimeoutError(f"processes {sorted(pids)} are still busy after {_MOST_S:g} s without a question")


def with_descendants(pids: Collection[int]) -> set[int]:
    """Return the ids of these processes and of all their descendants."""
    everybody = (int(path.name) for path in _PROC.glob("[0-9]*"))
    parents = {pid: int(each[1]) for pid in everybody if (each := _fields(pid))}
    found = {*pids} & parents.keys()
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def command_of(pid: int) -> str:
    """Return the command line of a process, or the title that the process set for itself. Empty if the process has
    ended."""
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name; empty if the process does not exist."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
