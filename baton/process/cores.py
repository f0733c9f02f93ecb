"""Sets the CPU cores on which a process runs, and the priorities of its threads."""

import contextlib
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

_TASKS = Path("/proc/self/task")
_CGROUP = Path("/sys/fs/cgroup")
_GIVEN_WAY = 10
"""Number by which the nice values of other threads exceed that of the preferred thread (see `give_way_to`). If another
thread shares a core with the preferred thread, it gets about a tenth of that thread's processor time."""
_NICEST = 19


def pin(cores: Sequence[int]) -> None:
    """Pin all threads of this process, including later ones, to `cores`. Does nothing if `cores` is empty or the
    operating system does not support pinning."""
    if cores and hasattr(os, "sched_setaffinity"):
        for thread in _TASKS.iterdir():
            with contextlib.suppress(ProcessLookupError):  # the thread has just ended
                os.sched_setaffinity(int(thread.name), cores)


def give_way_to(thread_id: int) -> None:
    """Give one thread of this process a higher priority than all others, by lowering the priority of the other threads.
    `thread_id` is the native id of the preferred thread. Threads that are created later inherit the lower priority.

    Does nothing except on Linux, where each thread has its own priority.
    """
    if sys.platform != "linux":
        return
    nice = min(os.getpriority(os.PRIO_PROCESS, thread_id) + _GIVEN_WAY, _NICEST)
    for other in (int(thread.name) for thread in _TASKS.iterdir()):
        with contextlib.suppress(OSError):  # a thread has just ended, or a sandbox forbids it
            if other != thread_id and os.getpriority(os.PRIO_PROCESS, other) < nice:
                os.setpriority(os.PRIO_PROCESS, other, nice)


def cpu_quota(cgroup: Path = _CGROUP) -> float:
    """Return the number of cores whose time the container of this process may use; infinity if it has no limit."""
    limit = cgroup / "cpu.max"
    quota, period = limit.read_text().split() if limit.exists() else ("max", "0")
    return math.inf if quota == "max" else int(quota) / int(period)
