"""Functions that several routes use: the caller's identity, detection of clients that disconnect, and server-sent
events. Runs on the asyncio loop."""

import asyncio
import logging
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TypeVar

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from baton.errors import BatonError, InvalidArgumentError, RequestCancelledError, UnauthenticatedError
from baton.limits import MAX_CALLER_BYTES, MAX_REQUEST_ID_CHARS, MAX_TRACE_CHARS
from baton.process.tracing import has_span
from baton.text.bounded_reading import BoundedReading
from gateway.errors import HeadersTooLongError

T = TypeVar("T")
logger = logging.getLogger(__name__)

_LONG_BYTES = 1024
"""Number of bytes from which a body is converted in a thread, because tokenizing its prompt may take long."""
_CALLER = ("authorization", "baton-tenant")
"""HTTP headers that identify the caller. The server checks them. `baton-tenant` is passed on only if the gateway trusts
it (`http.trust_tenant`)."""
_TRACE = ("traceparent", "tracestate")
"""HTTP headers with the caller's trace context (W3C)."""
_REQUEST_ID = re.compile(rf"[\x21-\x7e]{{1,{MAX_REQUEST_ID_CHARS}}}")
_METADATA = re.compile(r"[\x20-\x7e]*")
"""Pattern of text that gRPC accepts as metadata: printable ASCII."""
_TRACE_VALUE = re.compile(rf"[\x20-\x7e]{{0,{MAX_TRACE_CHARS}}}")
"""Pattern of trace headers that are passed on: printable ASCII, as gRPC requires. W3C's Trace Context requires that
values of up to 512 bytes are passed on."""
FAULT = "the HTTP process failed at this request: see its log"
_SSE = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class EventStream(StreamingResponse):
    """Streaming HTTP response of server-sent events. When the response ends, it closes the streams from which its
    events are made, even if the client disconnects before the first event."""

    def __init__(self, lines: AsyncIterator[bytes], stack: AsyncExitStack, headers: Mapping[str, str]) -> None:
        super().__init__(lines, media_type="text/event-stream", headers={**headers, **_SSE})
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        async with self._stack:
            await super().__call__(scope, receive, send)


class DeferredResponse(Response):
    """Response that is made when the handler of its request has returned. The memory of the request's body is then
    free, while the client waits for tokens."""

    def __init__(self, make: Callable[[], Awaitable[Response]]) -> None:
        super().__init__()
        self._make = make

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Make the response and send it. Raises the errors of the function that makes it."""
        await (await self._make())(scope, receive, send)


def error_of(failure: Exception) -> BatonError:
    """Convert an exception in a stream to the error that the client gets. An exception that is not a BatonError is a
    fault of this process, and is logged."""
    if isinstance(failure, BatonError):
        return failure
    logger.error("a stream failed", exc_info=failure)
    return BatonError(FAULT)


async def read_body(request: Request, read: Callable[[], T], num_more_bytes: int = 0) -> T:
    """Call `read` and return its result. `read` is called in a thread if it processes many bytes: the request's body
    plus `num_more_bytes`. Raises the errors of `read`, and ResourceExhaustedError when too many bytes are being
    processed at the same time."""
    num_bytes: int = request.state.num_body_bytes + num_more_bytes
    reading: BoundedReading = request.app.state.reading
    return await reading.run(num_bytes, read) if num_bytes >= _LONG_BYTES else read()


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Wait for `work` and return its result. If the client disconnects first, `work` is cancelled and
    RequestCancelledError is raised."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(_until_gone(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise RequestCancelledError("the client has gone")
        return await working
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


def caller_of(request: Request, *, traces: bool = True) -> Mapping[str, str]:
    """Return the headers that identify the caller, as metadata for calls to the server. If `traces` is true, the
    caller's trace context is included, without trace headers that gRPC cannot send. The trace context is omitted if
    this process records a trace span of its own.

    Raises UnauthenticatedError for a key that gRPC cannot send, InvalidArgumentError for a tenant that gRPC cannot
    send, and HeadersTooLongError if the headers have more than MAX_CALLER_BYTES bytes.
    """
    caller = _sent(request, _CALLER if request.app.state.trusts_tenant else _CALLER[:1])
    for name, value in caller.items():
        if not _METADATA.fullmatch(value):
            kind = UnauthenticatedError if name == "authorization" else InvalidArgumentError
            raise kind(f"header {name} has a character that is not printable ASCII: send it without")
    if (num_bytes := sum(map(len, caller.values()))) > MAX_CALLER_BYTES:
        raise HeadersTooLongError(
            f"{' and '.join(caller)}: {num_bytes} bytes exceed the limit of {MAX_CALLER_BYTES}; send a shorter key"
        )
    if traces and not has_span():
        trace = _sent(request, _TRACE)
        caller |= {name: value for name, value in trace.items() if _TRACE_VALUE.fullmatch(value)}
    return caller


def request_id_of(request: Request, prefix: str) -> str:
    """Return the request's id. It is the client's header x-request-id if that is valid, and otherwise a new id that
    begins with `prefix`."""
    named = request.headers.get("x-request-id", "")
    return named if _REQUEST_ID.fullmatch(named) else prefix + uuid.uuid4().hex


def _sent(request: Request, names: Sequence[str]) -> dict[str, str]:
    return {name: request.headers[name] for name in names if name in request.headers}


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
