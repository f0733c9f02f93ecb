"""Waiting for what must come true soon, without fixed sleeps in the tests themselves."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

LIMIT_S = 20.0
"""Limit that only a hang reaches. It is below the TTL of leases and kept streams (30 s), which frees slots as well."""
_PAUSE_S = 0.02
_MOST_S = 5 * _PAUSE_S
"""What one look counts for at most: on a crowded machine, time in which this process was not scheduled is nobody's
delay."""


async def eventually(read: Callable[[], Awaitable[T]], holds: Callable[[T], bool], within_s: float = LIMIT_S) -> T:
    """Reads until `holds(value)`; fails with the last value after `within_s` seconds of looking."""
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
