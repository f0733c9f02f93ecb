"""What surrounds the routes: a limit on bodies, and counts of requests. Around any ASGI application; on the loop.

Streams pass through message by message: nothing is put between a route and its client that would wait or copy.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.channel_options import MAX_MESSAGE_BYTES
from gateway.errors import BodyTooLargeError, error_body, status_of

MAX_BODY_BYTES = MAX_MESSAGE_BYTES
"""Bytes of a body, at most: as many as a request over gRPC may have."""


class BodyLimit:
    """Refuses a body with status 413 as soon as its length is known, and cuts off one that does not say its length."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > MAX_BODY_BYTES:
            await _refuse(int(length), scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > MAX_BODY_BYTES:
                raise BodyTooLargeError("too long")
            return message

        async def guarded(message: Message) -> None:
            if num_bytes <= MAX_BODY_BYTES:
                await send(message)
            elif message["type"] == "http.response.start":  # whatever the application makes of the cut
                await _refuse(num_bytes, scope, receive, send)

        await self._app(scope, counted, guarded)


class RequestCounts:
    """Counts requests by route and status, and those that are being answered, to the end of their streams."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self._app = app
        self._num_requests = Counter(
            "baton_http_requests", "Requests by route and status.", ["route", "status"], registry=registry
        )
        self._num_running = Gauge("baton_http_running", "Requests that are being answered.", registry=registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "other")
                self._num_requests.labels(route, str(message["status"])).inc()
            await send(message)

        with self._num_running.track_inprogress():
            await self._app(scope, receive, noted)


async def _refuse(num_bytes: int, scope: Scope, receive: Receive, send: Send) -> None:
    error = BodyTooLargeError(f"body has {num_bytes} bytes or more: the limit is {MAX_BODY_BYTES}; send less text")
    await JSONResponse(error_body(error), status_of(error))(scope, receive, send)
