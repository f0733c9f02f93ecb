"""How long a callback keeps an asyncio loop, in processor time, to which other processes add nothing."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

TICK_S = 0.005


@dataclass
class Held:
    """The most processor time that the loop's thread took between two wakes of a task that sleeps for TICK_S."""

    most_s: float = 0.0


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
    while True:
        before_s = time.thread_time()
        started.set()
        await asyncio.sleep(TICK_S)
        held.most_s = max(held.most_s, time.thread_time() - before_s)
