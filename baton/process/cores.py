"""Sets the cores on which a process runs, and the priorities of its threads on these cores."""

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

_TASKS = Path("/proc/self/task")
_GIVEN_WAY = 10
"""Number of nice levels by which other threads are lowered. On a contended core they then get a tenth of the first
thread's share."""
_NICEST = 19


def pin(cores: Sequence[int]) -> None:
    """Pin this process, with its current and future threads, to `cores`. Does nothing if `cores` is empty or the
    operating system does not support it."""
    if cores and hasattr(os, "sched_setaffinity"):
        for thread in _TASKS.iterdir():
            with contextlib.suppress(ProcessLookupError):  # the thread has just ended
                os.sched_setaffinity(int(thread.name), cores)


def give_way_to(thread_id: int) -> None:
    """Lower the priority of all other threads of this process, current and future, below that of the thread with native
    id `thread_id`. Does nothing except on Linux, where each thread has its own priority."""
    if sys.platform != "linux":
        return
    nice = min(os.getpriority(os.PRIO_PROCESS, thread_id) + _GIVEN_WAY, _NICEST)
    for other in (int(thread.name) for thread in _TASKS.iterdir()):
        with contextlib.suppress(OSError):  # a thread has just ended, or a sandbox forbids it
            if other != thread_id and os.getpriority(os.PRIO_PROCESS, other) < nice:
                os.setpriority(os.PRIO_PROCESS, other, nice)
