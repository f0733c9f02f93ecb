"""Polling for conditions that must become true soon, in place of fixed sleeps in tests."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

LIMIT_S = 20.0
"""Time limit in seconds that only a hang exceeds. It is below the TTL of leases and kept streams (30 s), whose expiry
would free slots, too."""
_PAUSE_S = 0.02
_MOST_S = 5 * _PAUSE_S
"""Maximum time in seconds that one check counts towards the limit. Time in which this process was not scheduled on a
busy machine does not count."""


async def eventually(read: Callable[[], Awaitable[T]], holds: Callable[[T], bool], within_s: float = LIMIT_S) -> T:
    """Call `read` until `holds(value)` is true, and return the value. Fails with the last value after `within_s`
    seconds of polling."""
    spent_s, looked_s = 0.0, time.monotonic()
    while True:
        value = await read()
        if holds(value):
            return value
        assert spent_s < within_s, f"still {value!r} after {within_s:g} s"
        await asyncio.sleep(_PAUSE_S)
        now_s = time.monotonic()
        spent_s += min(now_s - looked_s, _MOST_S)
        looked_s = now_s
