"""Graceful end of an HTTP server: running requests get time to end by themselves, new ones are refused. Runs on the
asyncio loop."""

import asyncio
import contextlib

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.errors import UnavailableError
from gateway.errors import error_body, status_of

_OPEN = ("/health", "/metrics")
"""Paths that are answered until the server has ended."""


class Drain:
    """ASGI application that wraps another one and counts its running requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._is_ending = False
        self._num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it with status 503 if the server is ending."""
        if self._is_ending and scope["type"] == "http" and scope["path"] not in _OPEN:
            error = UnavailableError("the HTTP gateway is ending: try again, on a new connection")
            answer = JSONResponse(error_body(error), status_of(error), headers={"connection": "close"})
            await answer(scope, receive, send)
            return
        self._num_running += 1
        self._idle.clear()
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._idle.set()

    async def end(self, grace_s: float) -> None:
        """Start to refuse new requests. Return when no request runs, or after `grace_s` seconds."""
        self._is_ending = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
