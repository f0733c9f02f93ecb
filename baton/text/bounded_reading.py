"""Reads requests in threads, with a limit on the total size of the requests that are being read. Reading a request
means parsing and tokenizing it.

The limit is necessary because tokenizing needs many times the memory of the text. Both front ends use this module. Used
on one event loop.
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
"""Bytes of memory that tokenizing needs for each byte of text. It was measured with text that needs much memory."""
_MEMORY_SHARE = 0.25
"""Fraction of the free memory that may be used to read requests."""
_RETRY_S = 0.1
"""Time in seconds after which the client of a rejected request should retry. In this time, the process reads about ten
thousand tokens."""


class BoundedReading:
    """Parses and tokenizes requests in threads. Limits the total bytes of the requests that are processed at once."""

    def __init__(self, max_bytes: int | None = None) -> None:
        """Set the maximum total size in bytes of the requests that are read (parsed and tokenized) at the same time.
        `max_bytes` None: the limit is derived from the free memory (`reading_bytes`). A request that is larger than the
        limit is read only while no other request is being read."""
        self._max_bytes = reading_bytes(free_bytes()) if max_bytes is None else max_bytes
        self._num_bytes = 0

    async def run(self, num_bytes: int, read: Callable[[], T]) -> T:
        """Call `read`, which parses and tokenizes a request, in a thread. Return its result. `num_bytes` is the size of
        the request.

        Raises the errors of `read`. Raises ResourceExhaustedError immediately if the request would exceed the limit on
        bytes that are being read.
        """
        self._take(num_bytes)
        given_up = threading.Event()
        reading = asyncio.get_running_loop().run_in_executor(None, _unless, given_up, read)
        reading.add_done_callback(partial(self._give_back, num_bytes))
        try:
            await asyncio.wait((reading,))  # if the wait is cancelled, the read runs and counts until it ends
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
            reading.exception()  # else asyncio logs the error of a call that was cancelled


def reading_bytes(num_bytes_free: int) -> int:
    """Return the maximum total number of bytes of requests that a process may read at the same time. `num_bytes_free`
    is the free memory in bytes."""
    return min(MAX_READING_BYTES, int(_MEMORY_SHARE * num_bytes_free) // _MEMORY_OF_BYTE)


def _unless(given_up: threading.Event, read: Callable[[], T]) -> T:
    if given_up.is_set():
        raise RequestCancelledError("the client went away before its request was read")
    return read()
