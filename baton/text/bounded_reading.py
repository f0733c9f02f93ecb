"""Reads long requests in threads, with a bound on the bytes that are being read. Belongs to one loop.

Both front ends read requests through it: tokenizing a text takes many times its bytes of memory.
"""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from baton.errors import RequestCancelledError, ResourceExhaustedError
from baton.limits import MAX_READING_BYTES
from baton.process.memory import free_bytes

T = TypeVar("T")

_MEMORY_OF_BYTE = 160
"""Bytes of memory that one byte of text takes while it is tokenized, measured on text that takes much."""
_MEMORY_SHARE = 0.25
"""Part of the free memory that reading may take."""
_RETRY_S = 0.1
"""Retry delay of a refused request, in seconds: ten thousand tokens are read in about that time."""


class BoundedReading:
    """Bytes of requests that threads of the loop's pool are reading."""

    def __init__(self, max_bytes: int | None = None) -> None:
        """`max_bytes` bounds the bytes that are being read at a time; None: a bound from the free memory
        (`reading_bytes`). A longer request is read only while no other is being read."""
        self._max_bytes = reading_bytes(free_bytes()) if max_bytes is None else max_bytes
        self._num_bytes = 0

    async def run(self, num_bytes: int, read: Callable[[], T]) -> T:
        """Return the result of `read`, called in a thread. Raises the errors of `read`, and ResourceExhaustedError at
        once when too many bytes are being read."""
        self._take(num_bytes)
        given_up = threading.Event()
        reading = asyncio.get_running_loop().run_in_executor(None, _unless, given_up, read)
        reading.add_done_callback(partial(self._give_back, num_bytes))
        try:
            await asyncio.wait((reading,))  # a cancelled wait leaves the read running, and counted until it ends
            return reading.result()
        finally:
            given_up.set()
            del reading  # else the error's traceback and the future would keep each other alive

    def _take(self, num_bytes: int) -> None:
        if self._num_bytes and self._num_bytes + num_bytes > self._max_bytes:
            raise ResourceExhaustedError(
                f"{self._num_bytes} bytes of requests are being read, and {num_bytes} more exceed the limit of "
                f"{self._max_bytes}: try again in {_RETRY_S:.1f} s",
                retry_after_s=_RETRY_S,
            )
        self._num_bytes += num_bytes

    def _give_back(self, num_bytes: int, reading: asyncio.Future[Any]) -> None:
        self._num_bytes -= num_bytes
        if not reading.cancelled():
            reading.exception()  # else asyncio logs an error whose call has gone


def reading_bytes(num_bytes_free: int) -> int:
    """Return the number of bytes of requests that a process with `num_bytes_free` of free memory may read at a time."""
    return min(MAX_READING_BYTES, int(_MEMORY_SHARE * num_bytes_free) // _MEMORY_OF_BYTE)


def _unless(given_up: threading.Event, read: Callable[[], T]) -> T:
    if given_up.is_set():
        raise RequestCancelledError("the client went away before its request was read")
    return read()
