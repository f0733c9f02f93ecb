"""Threads on which a prefill rank opens cached blocks, writes blocks, and copies blocks to disk.

This work may wait for locks, or several seconds for a disk that does not answer
(`baton.modeling.prefix_store.disk_tier`). Therefore it does not use the event loop's default thread pool, where it
could delay heartbeats and new epochs. Used by `prefill_workers.servicer`. All methods except `close` are called on the
loop's thread.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


_MAX_SINKING = 64
"""Maximum number of prompts whose blocks wait to be copied to disk. If that number waits, the blocks of another prompt
stay in memory without a copy on disk."""


class BlockThreads:
    """Pool of two threads for work that jobs wait for, and one thread that copies blocks to disk. Jobs do not wait for
    the copies."""

    def __init__(self) -> None:
        self._num_sinking = 0
        self._jobs = ThreadPoolExecutor(2, thread_name_prefix="prefix-blocks")
        self._sinks = ThreadPoolExecutor(1, thread_name_prefix="prefix-sink")
        self._evicted: list[str] = []

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run `work` on a thread and return its result. Cancelling the call does not stop work that has begun."""
        return await asyncio.get_running_loop().run_in_executor(self._jobs, work)

    def sink(self, work: Callable[[], list[str]]) -> None:
        """Queue `work` for the thread that copies blocks to disk, or drop it if the queue is full. Does not block.
        `work` must return the names of the blocks that it evicts, and must not raise."""
        if self._num_sinking < _MAX_SINKING:
            self._num_sinking += 1
            asyncio.get_running_loop().run_in_executor(self._sinks, work).add_done_callback(self._end)

    def take_evicted(self) -> tuple[str, ...]:
        """Return the names of the blocks that copies to disk have evicted since the last call of this method."""
        evicted, self._evicted = self._evicted, []
        return tuple(evicted)

    def close(self) -> None:
        """Drop queued work, and block until running work has ended. Idempotent."""
        for pool in (self._jobs, self._sinks):
            pool.shutdown(cancel_futures=True)

    def _end(self, sunk: "asyncio.Future[list[str]]") -> None:
        self._num_sinking -= 1
        if not sunk.cancelled():
            self._evicted += sunk.result()
