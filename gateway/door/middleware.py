"""ASGI middleware around the routes that counts requests. It works with any ASGI application. Runs on the asyncio loop.

The messages of a stream are passed on one by one, and are neither collected nor copied.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge
from starlette.types import ASGIApp, Message, Receive, Scope, Send


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
