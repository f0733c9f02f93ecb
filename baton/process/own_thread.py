"""Runs each blocking call in a separate thread, which ends with the call."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


async def in_own_thread(call: Callable[[], T]) -> T:
    """Run a blocking call in a new thread. Return the call's result, or raise its error, when the thread has ended. If
    the awaiting task is cancelled, the call continues, but the task does not wait for it.

    A separate thread is used for two reasons:

    - A thread that has ended keeps no object of the call alive. A thread of asyncio's pool may keep such objects for
      a short time. A garbage collection directly after a component was closed would then not free its memory.
    - OpenMP creates a team of helper threads for each thread that computes, and keeps the team until that thread ends.
      GNU's OpenMP (libgomp) lets idle helper threads spin if there are at most as many threads as cores. Otherwise
      they sleep, and each operation of an engine first waits until the kernel has woken the engine's team. In a
      measurement on two cores, a prompt of 205 tokens took a third longer.
    """
    executor = ThreadPoolExecutor(1, "own-thread")
    running = executor.submit(call)
    try:
        return await asyncio.wrap_future(running)
    finally:
        executor.shutdown(wait=running.done())  # a thread whose call has returned ends immediately
