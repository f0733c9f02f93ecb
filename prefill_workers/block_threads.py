"""The threads on which a prefill rank opens, writes and sinks its node's blocks, which may wait for locks and disks.

Not the loop's pool: heartbeats and new epochs go there, and never wait for blocks. On the loop.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


_MAX_SINKING = 64
"""Prompts that may wait for the disk: others go there when they are stored anew."""


class BlockThreads:
    """Two for what a job waits for, and one for what sinks to disk, for which none does."""

    def __init__(self) -> None:
        self._num_sinking = 0
        self._jobs = ThreadPoolExecutor(2, thread_name_prefix="prefix-blocks")
        self._sinks = ThreadPoolExecutor(1, thread_name_prefix="prefix-sink")
        self._evicted: list[str] = []

    async def run(self, work: Callable[[], Result]) -> Result:
        """What `work` returns or raises. If the call is cancelled, work that has begun goes on."""
        return await asyncio.get_running_loop().run_in_executor(self._jobs, work)

    def sink(self, work: Callable[[], list[str]]) -> None:
        """Does `work` in its turn, unless too much waits already; it returns the names of blocks that had to go, and
        raises nothing."""
        if self._num_sinking < _MAX_SINKING:
            self._num_sinking += 1
            asyncio.get_running_loop().run_in_executor(self._sinks, work).add_done_callback(self._end)

    def take_evicted(self) -> tuple[str, ...]:
        """What sinking evicted since the last call."""
        evicted, self._evicted = self._evicted, []
        return tuple(evicted)

    def close(self) -> None:
        """Returns when no work runs; what waits is dropped. Blocks. Idempotent."""
        for pool in (self._jobs, self._sinks):
            pool.shutdown(cancel_futures=True)

    def _end(self, sunk: "asyncio.Future[list[str]]") -> None:
        self._num_sinking -= 1
        if not sunk.cancelled():
            self._evicted += sunk.result()
