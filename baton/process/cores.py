"""Which cores a process runs on, and which of its threads comes first there."""

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

_TASKS = Path("/proc/self/task")
_GIVEN_WAY = 10
"""By which others are nicer: their share of a core that all want is a tenth of the first one's."""
_NICEST = 19


def pin(cores: Sequence[int]) -> None:
    """Pins this process, with the threads that it has and will have, to `cores` (empty: to none in particular); only
    where the system can."""
    if cores and hasattr(os, "sched_setaffinity"):
        for thread in _TASKS.iterdir():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(int(thread.name), cores)


def give_way_to(thread_id: int) -> None:
    """Lets this process's other threads, those that it has and those that they will start, wait for the thread of that
    native id where they want the same core; only on Linux, where threads have priorities of their own."""
    if sys.platform != "linux":
        return
    nice = min(os.getpriority(os.PRIO_PROCESS, thread_id) + _GIVEN_WAY, _NICEST)
    for other in (int(thread.name) for thread in _TASKS.iterdir()):
        with contextlib.suppress(OSError):  # likewise; or a sandbox forbids it
            if other != thread_id and os.getpriority(os.PRIO_PROCESS, other) < nice:
                os.setpriority(os.PRIO_PROCESS, other, nice)
