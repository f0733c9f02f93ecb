"""Detection of leaks after a test: threads, child processes, asyncio tasks.

Each `*_left` function compares the current state with a snapshot from before the test, and waits up to `GRACE_S` for
remaining items to end.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

GRACE_S = 10.0
"""Time in seconds that is allowed for threads, processes and tasks to end."""
_POLL_S = 0.01


def live_threads() -> frozenset[threading.Thread]:
    """Return the live threads that would prevent the process from exiting."""
    return frozenset(thread for thread in threading.enumerate() if not thread.daemon)


def child_processes() -> dict[int, str]:
    """Return this process's children, including unreaped ones, as a map from pid to command line or name. Empty on
    systems other than Linux."""
    children: dict[int, str] = {}
    if not _has_children():  # the usual case, and 100 times faster than reading all of /proc
        return children
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, fields = stat.read_text().rpartition(")")
            if int(fields.split()[1]) == os.getpid():
                children[int(stat.parent.name)] = _command(stat.parent) or f"unreaped {name.partition('(')[2]}"
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process has ended meanwhile
    # multiprocessing starts one resource tracker, which runs until the process ends
    children.pop(getattr(resource_tracker._resource_tracker, "_pid", None) or 0, None)
    return children


def threads_left(before: frozenset[threading.Thread], grace_s: float = GRACE_S) -> list[str]:
    """Return the names of threads that were started since `before` and are still alive."""
    return _once_settled(lambda: sorted(thread.name for thread in live_threads() - before), grace_s)


def processes_left(before: dict[int, str], grace_s: float = GRACE_S) -> list[str]:
    """Return the child processes that were started since `before` and still exist, alive or unreaped."""

    def left() -> list[str]:
        return [f"{pid}: {command}" for pid, command in child_processes().items() if pid not in before]

    return _once_settled(left, grace_s)


async def tasks_left(before: "set[asyncio.Task[Any]]", grace_s: float = GRACE_S) -> list[str]:
    """Return the running loop's tasks that were started since `before` and are not done."""
    extra = asyncio.all_tasks() - before - {asyncio.current_task()}
    if extra:
        _, extra = await asyncio.wait(extra, timeout=grace_s)
    return sorted(repr(task) for task in extra)


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # reaps nothing
    except ChildProcessError:
        return False
    return True


def _once_settled(left: Callable[[], list[str]], grace_s: float) -> list[str]:
    deadline, pause = time.monotonic() + grace_s, threading.Event()
    while (found := left()) and time.monotonic() < deadline:
        pause.wait(_POLL_S)
    return found


def _command(process: Path) -> str:
    return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
