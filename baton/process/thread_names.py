"""Sets thread names that the operating system shows. Python sets them itself since version 3.14."""

import contextlib
import sys
import threading
from pathlib import Path


def show_thread_name() -> None:
    """Set the operating system's name of the calling thread to the thread's Python name, cut to 15 characters. The name
    is shown by `top -H`, py-spy and /proc/PID/task/TID/comm. Does nothing except on Linux."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a sandbox forbids it: the name is for people only
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(threading.current_thread().name)
