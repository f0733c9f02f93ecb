"""Measures how long callbacks block an asyncio loop, and how late the loop wakes. Blocking is measured in processor
time, to which other processes add nothing. From a delay, the time for which other processes kept one of this process's
threads from running is subtracted."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

TICK_S = 0.005
_THREADS = Path("/proc/self/task")


@dataclass
class Held:
    """Largest delays of a task that sleeps for TICK_S repeatedly."""

    most_s: float = 0.0
    """Maximum processor time in seconds that the loop's thread used between two wake-ups."""
    most_lag_s: float = 0.0
    """Maximum delay of a wake-up in seconds, after subtracting the time for which a thread of this process was ready
    but not running (the maximum over all threads). On an idle machine, nothing is subtracted. A thread that holds the
    interpreter's lock increases the delay."""


@asynccontextmanager
async def watching_loop() -> AsyncIterator[Held]:
    """Watch the running loop while the block runs."""
    held = Held()
    started = asyncio.Event()
    task = asyncio.create_task(_tick(held, started))
    await started.wait()
    try:
        yield held
        await asyncio.sleep(0)  # also count a tick that is overdue now
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _tick(held: Held, started: asyncio.Event) -> None:
    waited = _waited_s()
    while True:
        before_s, due_s = time.thread_time(), time.monotonic() + TICK_S
        started.set()
        await asyncio.sleep(TICK_S)
        late_s = time.monotonic() - due_s
        held.most_s = max(held.most_s, time.thread_time() - before_s)
        now = _waited_s()
        longest_s = max(each_s - waited.get(thread, 0.0) for thread, each_s in now.items())
        held.most_lag_s, waited = max(held.most_lag_s, late_s - longest_s), now


def _waited_s() -> dict[str, float]:
    """Return the total time in seconds for which each thread of this process was ready to run, but not running."""
    found = dict[str, float]()
    for thread in _THREADS.iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    return found
