"""Blocking calls that leave nothing behind of the threads in which they ran."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


async def in_own_thread(call: Callable[[], T]) -> T:
    """Run a blocking call in a thread which has ended when this returns its result, or raises its error. Cancelling
    does not wait for the call.

    Such a thread holds no object of the call any more, where one of asyncio's own may hold them a little longer: a
    collection of garbage right after a part of the process was closed would miss what only that thread still holds.

    OpenMP keeps a team of threads for each thread that computed, as long as that thread lives. GNU's (libgomp) lets
    teams spin for work only while it keeps no more threads than there are cores; with one team too many, every
    operation of an engine waits until the kernel has woken its team. A prompt of 205 tokens took a third longer on two
    cores.
    """
    executor = ThreadPoolExecutor(1, "own-thread")
    running = executor.submit(call)
    try:
        return await asyncio.wrap_future(running)
    finally:
        executor.shutdown(wait=running.done())  # a thread whose call is done ends at once
