"""Blocking calls that leave nothing behind of the threads in which they ran."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


async def in_own_thread(call: Callable[[], T]) -> T:
    """Run a blocking call that computes in a thread which ends with it, and return its result.

    OpenMP keeps a team of threads for each thread that computed, as long as that thread lives. GNU's (libgomp) lets
    teams spin for work only while it keeps no more threads than there are cores; with one team too many, every
    operation of an engine waits until the kernel has woken its team. A prompt of 205 tokens took a third longer on two
    cores.
    """
    executor = ThreadPoolExecutor(1, "own-thread")
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, call)
    finally:
        executor.shutdown(wait=False)
