"""A coroutine's wait that other threads can end: how a commit waits for bytes (step 7 of a request's way)."""

import asyncio
import math


class LoopWaiter:
    """An event of the loop that it is made on. One coroutine waits, any thread may wake."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def wake(self) -> None:
        """Does not block; may be called more than once, and after the loop has closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, timeout_s: float) -> None:
        """Returns when woken or after `timeout_s` seconds."""
        try:
            await asyncio.wait_for(self._event.wait(), None if timeout_s == math.inf else timeout_s)
        except TimeoutError:
            return  # the caller looks again at what is missing and how much time is left
