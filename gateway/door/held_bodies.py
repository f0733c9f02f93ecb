"""Receives the bodies of requests, with limits on their bytes and on the time that they take. Runs on the asyncio loop.

A body counts from its first byte until it is parsed. If the bodies that count have too many bytes, the one that has
been arriving for the longest time is refused, so that clients that send slowly do not block the others.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from fastapi import Request

from baton.errors import BatonError, DeadlineExceededError, RequestCancelledError, ResourceExhaustedError
from baton.limits import BODY_BYTES_PER_S, BODY_S, MAX_ADDRESS_BODIES_BYTES, MAX_BODIES_BYTES, MAX_BODY_BYTES
from gateway.errors import BodyTooLargeError

T = TypeVar("T")
_RETRY_S = 1.0


@dataclass(eq=False)
class _Body:
    """Body that is being received or parsed."""

    address: str
    """Address of the client."""
    num_bytes: int = 0
    """Number of bytes that were received, and count."""
    waiting: asyncio.Timeout | None = None
    """Timeout of the wait for the next bytes."""
    refusal: BatonError | None = None
    """Error of a body that was refused because other bodies need its bytes."""


class HeldBodies:
    """Bodies of all requests that are being received or parsed."""

    def __init__(self) -> None:
        self._arriving: dict[_Body, None] = {}  # the oldest is first
        self._num_bytes = Counter[str]()

    async def read(self, request: Request, parse: Callable[[bytes], Awaitable[T]]) -> T:
        """Receive the body of a request, and return the result of `parse`, which is called with the body. No copy of
        the body is kept.

        Raises the errors of `parse`. Raises BodyTooLargeError for too many bytes, DeadlineExceededError for a body that
        arrives too slowly, ResourceExhaustedError if other bodies need its bytes, and RequestCancelledError if the
        client disconnects.
        """
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > MAX_BODY_BYTES:
            raise _too_large(int(length))
        body = _Body(_address(request))
        self._arriving[body] = None
        try:
            return await parse(await self._received(body, request))
        finally:
            self._arriving.pop(body, None)
            self._count(body, -body.num_bytes)

    @contextmanager
    def held(self, request: Request, num_bytes: int) -> Iterator[None]:
        """Count `num_bytes` bytes of a request that runs, inside the context. Raises ResourceExhaustedError if they
        are too many together with those of other requests."""
        body = _Body(_address(request))
        self._count(body, num_bytes)
        try:
            if self._num_bytes[body.address] > MAX_ADDRESS_BODIES_BYTES or self._num_bytes.total() > MAX_BODIES_BYTES:
                raise _full("the running requests", "this one is new")
            yield
        finally:
            self._count(body, -num_bytes)

    async def _received(self, body: _Body, request: Request) -> bytes:
        now_s, chunks, waited_s = asyncio.get_running_loop().time, list[bytes](), 0.0
        while True:
            began_s = now_s()
            body.waiting = asyncio.timeout(BODY_S + body.num_bytes / BODY_BYTES_PER_S - waited_s)
            try:
                async with body.waiting:
                    message = await request.receive()
            except TimeoutError as error:
                raise body.refusal or _too_slow(body.num_bytes) from error
            if body.refusal is not None:
                raise body.refusal
            if message["type"] == "http.disconnect":
                raise RequestCancelledError("the client has gone")
            waited_s += now_s() - began_s
            chunks.append(message.get("body", b""))
            self._count(body, len(chunks[-1]))
            self._check(body)
            if not message.get("more_body", False):
                del self._arriving[body]
                return b"".join(chunks)

    def _count(self, body: _Body, num_bytes: int) -> None:
        body.num_bytes += num_bytes
        self._num_bytes[body.address] += num_bytes
        if not self._num_bytes[body.address]:
            del self._num_bytes[body.address]

    def _check(self, body: _Body) -> None:
        """Raise an error if a body has too many bytes. If several bodies together have too many, refuse those that have
        been arriving for the longest time. Bodies without bytes are not refused, because that frees nothing."""
        if body.num_bytes > MAX_BODY_BYTES:
            raise _too_large(body.num_bytes)
        while self._num_bytes[body.address] > MAX_ADDRESS_BODIES_BYTES:
            self._refuse(next(each for each in self._arriving if each.num_bytes and each.address == body.address), body)
        while self._num_bytes.total() > MAX_BODIES_BYTES:
            self._refuse(next(each for each in self._arriving if each.num_bytes), body)

    def _refuse(self, oldest: _Body, body: _Body) -> None:
        """Refuse `oldest`. `body` is the body whose bytes have just arrived."""
        oldest.refusal = _full("the bodies of all requests", "this one has been arriving for the longest time")
        if oldest is body:
            raise oldest.refusal
        del self._arriving[oldest]
        self._count(oldest, -oldest.num_bytes)
        assert oldest.waiting is not None
        if not oldest.waiting.expired():
            oldest.waiting.reschedule(0.0)  # its wait ends now


def _address(request: Request) -> str:
    return "" if request.client is None else request.client.host


def _full(what: str, why: str) -> BatonError:
    return ResourceExhaustedError(
        f"{what} hold over {MAX_BODIES_BYTES} bytes, or those of this address over {MAX_ADDRESS_BODIES_BYTES}, and "
        f"{why}: try again in {_RETRY_S:.0f} s",
        retry_after_s=_RETRY_S,
    )


def _too_large(num_bytes: int) -> BatonError:
    return BodyTooLargeError(f"body has {num_bytes} bytes or more: the limit is {MAX_BODY_BYTES}; send less text")


def _too_slow(num_bytes: int) -> BatonError:
    return DeadlineExceededError(
        f"body is too slow: after {num_bytes} bytes, the rest was waited for longer than {BODY_S:g} s and a second for "
        f"each {BODY_BYTES_PER_S} bytes; send faster"
    )
