"""Which cores a process runs on."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path


def pin(cores: Sequence[int]) -> None:
    """Pins this process, with the threads that it has and will have, to `cores` (empty: to none in particular); only
    where the system can."""
    if cores and hasattr(os, "sched_setaffinity"):
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(int(thread.name), cores)
