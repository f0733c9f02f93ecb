"""Runs blocking calls, each in a thread of its own that ends with the call."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


async def in_own_thread(call: Callable[[], T]) -> T:
    """Run a blocking call in a new thread, and return its result or raise its error once the thread has ended. If the
    awaiting task is cancelled, it does not wait for the call.

    A thread that has ended does not keep any object of the call alive. A thread of asyncio's pool may keep these
    objects for a short time. A garbage collection right after a component was closed would then not free them.

    OpenMP keeps a team of threads for each thread that computed, until that thread ends. GNU's OpenMP (libgomp) lets
    teams spin for work only while its threads do not outnumber the cores. If there is one team more, every operation of
    an engine waits until the kernel has woken its team. In a measurement on two cores, a prompt of 205 tokens then took
    a third longer.
    """
    executor = ThreadPoolExecutor(1, "own-thread")
    running = executor.submit(call)
    try:
        return await asyncio.wrap_future(running)
    finally:
        executor.shutdown(wait=running.done())  # a thread whose call has returned ends immediately
