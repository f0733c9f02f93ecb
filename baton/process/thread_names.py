"""Names of threads that the operating system shows: Python gives them to it by itself from 3.14 on."""

import contextlib
import sys
import threading
from pathlib import Path


def show_thread_name() -> None:
    """Give the operating system the calling thread's name, of which it keeps 15 characters. `top -H`, py-spy and
    /proc/PID/task/TID/comm show it. Does nothing except on Linux."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a sandbox forbids it: the name is for people only
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(threading.current_thread().name)
