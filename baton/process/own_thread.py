"""Blocking calls in threads that end with the call."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


async def in_own_thread(call: Callable[[], T]) -> T:
    """Run a blocking call in a thread which has ended when this returns its result, or raises its error. Cancelling
    does not wait for the call.

    A thread that has ended holds no object of the call. A thread of asyncio's own pool may hold such objects a little
    longer, and a garbage collection right after a part of the process was closed would miss them.

    OpenMP keeps a team of threads for each thread that computed, until that thread ends. GNU's OpenMP (libgomp) lets
    teams spin for work only while its threads do not outnumber the cores. With one team too many, every operation of an
    engine waits until the kernel has woken its team: a prompt of 205 tokens took a third longer on two cores.
    """
    executor = ThreadPoolExecutor(1, "own-thread")
    running = executor.submit(call)
    try:
        return await asyncio.wrap_future(running)
    finally:
        executor.shutdown(wait=running.done())  # a thread whose call is done ends at once
