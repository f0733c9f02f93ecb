"""How long a callback keeps an asyncio loop, in processor time, to which other processes add nothing; and how late the
loop wakes, less the time for which others kept a thread of this process from a processor."""

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
    """Delays of a task that sleeps for TICK_S again and again."""

    most_s: float = 0.0
    """The most processor time that the loop's thread took between two wakes."""
    most_lag_s: float = 0.0
    """The most seconds by which a wake was late, less those for which one thread of this process waited for a processor
    meanwhile. On an idle machine that is the lag. A thread that keeps the interpreter to itself adds to it."""


@asynccontextmanager
async def watching_loop() -> AsyncIterator[Held]:
    """Watch the running loop while the block runs."""
    held = Held()
    started = asyncio.Event()
    task = asyncio.create_task(_tick(held, started))
    await started.wait()
    try:
        yield held
        await asyncio.sleep(0)  # a tick that is overdue by now counts
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
    """Return for how many seconds each thread of this process has been ready to run while others ran."""
    found = dict[str, float]()
    for thread in _THREADS.iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            found[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    return found
