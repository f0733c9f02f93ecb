"""ASGI middleware around the routes: limits on bodies, and counts of requests. It works with any ASGI application. Runs
on the asyncio loop.

The messages of a stream are passed on one by one, and are neither collected nor copied.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.errors import BatonError, ResourceExhaustedError
from baton.limits import MAX_BODIES_BYTES, MAX_BODY_BYTES
from gateway.errors import BodyTooLargeError, error_body, error_headers, status_of

_RETRY_S = 1.0


class BodyLimit:
    """Middleware that limits the bytes of each body, and of all bodies together. A body that declares too many bytes in
    its header is refused at once. A body without a declared length is refused when it exceeds the limit."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._num_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > MAX_BODY_BYTES:
            await _refuse(_too_large(int(length)), scope, receive, send)
            return
        num_bytes, refusal = 0, None

        async def counted() -> Message:
            nonlocal num_bytes, refusal
            message = await receive()
            num_new = len(message.get("body", b""))
            num_bytes += num_new
            self._num_bytes += num_new
            if num_new and (refusal := self._refusal(num_bytes)) is not None:
                raise refusal
            return message

        async def guarded(message: Message) -> None:
            if refusal is None:
                await send(message)
            elif message["type"] == "http.response.start":  # any answer of the application to the cut
                await _refuse(refusal, scope, receive, send)

        try:
            await self._app(scope, counted, guarded)
        finally:
            self._num_bytes -= num_bytes

    def _refusal(self, num_bytes: int) -> BatonError | None:
        """Return the error with which a request with a body of `num_bytes` bytes is refused; None if it is accepted."""
        if num_bytes > MAX_BODY_BYTES:
            return _too_large(num_bytes)
        if self._num_bytes > MAX_BODIES_BYTES:
            text = f"the bodies of all requests have over {MAX_BODIES_BYTES} bytes: try again in {_RETRY_S:.0f} s"
            return ResourceExhaustedError(text, retry_after_s=_RETRY_S)
        return None


class RequestCounts:
    """Middleware that counts requests by route and status, and the requests that run now. A request runs until its
    stream ends."""

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


def _too_large(num_bytes: int) -> BatonError:
    return BodyTooLargeError(f"body has {num_bytes} bytes or more: the limit is {MAX_BODY_BYTES}; send less text")


async def _refuse(error: BatonError, scope: Scope, receive: Receive, send: Send) -> None:
    answer = JSONResponse(error_body(error), status_of(error), headers=error_headers(error))
    await answer(scope, receive, send)
