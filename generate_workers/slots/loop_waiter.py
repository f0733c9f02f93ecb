"""A coroutine's wait that other threads can end: `SlotTable.commit` waits here for the bytes of a lease."""

import asyncio
import math


class LoopWaiter:
    """An event of the loop that it is made on. One coroutine waits; any thread may wake it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def wake(self) -> None:
        """Wake the waiting coroutine. Does not block; may be called more than once, and after the loop has closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, timeout_s: float) -> None:
        """Return when woken, or after `timeout_s` seconds without an error."""
        try:
            await asyncio.wait_for(self._event.wait(), None if timeout_s == math.inf else timeout_s)
        except TimeoutError:
            return  # the caller checks again which bytes are missing and how much time is left
