"""How late an asyncio loop wakes a task that asks to be woken every 5 ms."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

TICK_S = 0.005


@dataclass
class Lag:
    """The latest wake-up of a ticker, counted from when it was due."""

    worst_s: float = 0.0


@asynccontextmanager
async def ticking() -> AsyncIterator[Lag]:
    """Measure the running loop's lag while the block runs."""
    lag = Lag()
    started = asyncio.Event()
    task = asyncio.create_task(_tick(lag, started))
    await started.wait()
    try:
        yield lag
        await asyncio.sleep(0)  # a tick that is overdue by now counts
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _tick(lag: Lag, started: asyncio.Event) -> None:
    while True:
        due_s = time.monotonic() + TICK_S
        started.set()
        await asyncio.sleep(TICK_S)
        lag.worst_s = max(lag.worst_s, time.monotonic() - due_s)
