"""The threads on which a prefill rank opens, writes and sinks its node's cached blocks.

This work may wait for locks, and for seconds for a disk that does not answer (`baton.modeling.prefix_store.disk_tier`).
Used by `prefill_workers.servicer`. The threads are separate from the asyncio loop's default pool, so that heartbeats
and new epochs never wait for blocks. All methods except `close` are called on the loop.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


_MAX_SINKING = 64
"""Largest number of prompts that may wait for the disk; others are copied to it when they are stored again."""


class BlockThreads:
    """Two threads for work that a job waits for, and one thread that copies blocks to disk, for which no job waits."""

    def __init__(self) -> None:
        self._num_sinking = 0
        self._jobs = ThreadPoolExecutor(2, thread_name_prefix="prefix-blocks")
        self._sinks = ThreadPoolExecutor(1, thread_name_prefix="prefix-sink")
        self._evicted: list[str] = []

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run `work` on a thread and return its result. Cancelling the call does not stop work that has begun."""
        return await asyncio.get_running_loop().run_in_executor(self._jobs, work)

    def sink(self, work: Callable[[], list[str]]) -> None:
        """Queue `work` for the disk thread, or drop it when too much is queued already. Does not wait. `work` returns
        the names of the blocks that were evicted to make room, and must not raise."""
        if self._num_sinking < _MAX_SINKING:
            self._num_sinking += 1
            asyncio.get_running_loop().run_in_executor(self._sinks, work).add_done_callback(self._end)

    def take_evicted(self) -> tuple[str, ...]:
        """Return the names of the blocks that disk copies have evicted since the last call."""
        evicted, self._evicted = self._evicted, []
        return tuple(evicted)

    def close(self) -> None:
        """Drop queued work and wait until no work runs. Blocks. Idempotent."""
        for pool in (self._jobs, self._sinks):
            pool.shutdown(cancel_futures=True)

    def _end(self, sunk: "asyncio.Future[list[str]]") -> None:
        self._num_sinking -= 1
        if not sunk.cancelled():
            self._evicted += sunk.result()
