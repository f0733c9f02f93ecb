"""Waiting for what must come true soon, without fixed sleeps in the tests themselves."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def eventually(read: Callable[[], Awaitable[T]], holds: Callable[[T], bool], within_s: float) -> T:
    """Reads until `holds(value)`; fails with the last value after `within_s` seconds."""
    deadline = time.monotonic() + within_s
    while True:
        value = await read()
        if holds(value):
            return value
        assert time.monotonic() < deadline, f"still {value!r} after {within_s:g} s"
        await asyncio.sleep(0.02)
