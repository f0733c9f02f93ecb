"""Serves the application over HTTP or HTTPS with uvicorn. At the end, running requests get time to finish, and new ones
are refused. Runs on the asyncio loop."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import uvicorn
import uvloop
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.errors import ConfigError, UnavailableError
from gateway.app import Gateway
from gateway.door.bounded_http import BoundedProtocol, allow_connections
from gateway.door.hosts import is_loopback
from gateway.errors import error_body, status_of
from gateway.upstream import Upstream

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

T = TypeVar("T")
logger = logging.getLogger(__name__)
_OPEN = ("/health", "/metrics")
"""Paths that are still answered during the shutdown."""
_CUT_S = 5
"""Timeout in seconds for uvicorn to send the last events of interrupted streams during a shutdown."""


def run_on_own_loop(serving: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a new event loop of uvloop, and return its result. Serving HTTP takes less processor time on
    uvloop than on asyncio's own loop. Called on the main thread of a process. Blocks."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serving)


class Drain:
    """ASGI application that wraps another application, counts its running requests, and logs its failures."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._is_ending = False
        self._num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it with status 503 if the server is ending. After a failure that was answered
        with status 500, the connection stays open; if the answer was incomplete, uvicorn closes the connection."""
        if self._is_ending and scope["type"] == "http" and scope["path"] not in _OPEN:
            error = UnavailableError("the HTTP gateway is ending: try again, on a new connection")
            answer = JSONResponse(error_body(error), status_of(error), headers={"connection": "close"})
            await answer(scope, receive, send)
            return
        self._num_running += 1
        self._idle.clear()
        try:
            await self._app(scope, receive, send)
        except Exception:
            logger.exception("a request failed")
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._idle.set()

    async def end(self, grace_s: float) -> None:
        """Start to refuse new requests. Returns when no requests run, or after `grace_s` seconds."""
        self._is_ending = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._idle.wait()


@dataclass(frozen=True)
class Certificate:
    """PEM files of the server's certificate chain and private key, for HTTPS."""

    chain: Path
    key: Path


class HttpServer:
    """Running HTTP server. Created by `start`."""

    def __init__(
        self, server: uvicorn.Server, listening: socket.socket, port: int, drain: Drain, upstream: Upstream
    ) -> None:
        self.port = port
        self._server, self._drain, self._upstream = server, drain, upstream
        self._serving = asyncio.create_task(server.serve(sockets=[listening]))

    @classmethod
    async def start(
        cls,
        gateway: Gateway,
        listening: socket.socket,
        *,
        certificate: Certificate | None = None,
        spans: "TracerProvider | None" = None,
    ) -> Self:
        """Serve `gateway` on a bound socket. Returns when the server answers requests.

        The server owns the socket, and `stop` closes the gateway's upstream. `certificate` enables HTTPS; None: HTTP.
        `spans` provides the tracers that record a span of each request; None: no spans are recorded. The caller still
        owns `spans`. Raises ConfigError, and closes the socket, when the certificate cannot be read.
        """
        allow_connections()
        host, port, *_ = listening.getsockname()
        app = gateway.app(is_loopback=is_loopback(host))
        drain = Drain(app if spans is None else _traced(app, spans))
        config = uvicorn.Config(
            drain,
            http=partial(BoundedProtocol, max_of_address=gateway.rules.max_connections_per_address),  # type: ignore[arg-type]
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=gateway.rules.keep_alive_s,  # type: ignore[arg-type]  # any number of seconds
            server_header=False,
            ssl_certfile=None if certificate is None else certificate.chain,
            ssl_keyfile=None if certificate is None else certificate.key,
        )
        try:
            config.load()
        except OSError as error:
            listening.close()
            raise ConfigError(f"the certificate cannot be read ({error}): name its chain and key, in PEM") from error
        server = _Server(config)
        made = cls(server, listening, port, drain, gateway.upstream)
        began = asyncio.create_task(server.began.wait())
        await asyncio.wait((began, made._serving), return_when=asyncio.FIRST_COMPLETED)
        began.cancel()
        if made._serving.done():
            await made._serving  # raises why it ended
        return made

    async def stop(self, grace_s: float = 0.0) -> None:
        """Shut the server down, and close the upstream. New requests are refused with status 503. Running requests may
        end within `grace_s` seconds. The remaining ones are then ended: with status 503, or with an error event if they
        are streamed. A second call during the shutdown ends the running requests after the second call's `grace_s`."""
        await self._drain.end(grace_s)
        await self._upstream.close()
        self._server.config.timeout_graceful_shutdown = _CUT_S
        self._server.should_exit = True
        await self._serving


class _Server(uvicorn.Server):
    """uvicorn's server without signal handlers, because the command installs its own. An event is set when the server
    accepts connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.began = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.began.set()


def _traced(app: ASGIApp, spans: "TracerProvider") -> ASGIApp:
    """Return an application that makes a trace span for each request, until the end of its stream."""
    from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware  # here, because few gateways need it

    untraced = "/health,/ready,/metrics,/openapi.json,/console/$,/console/static,/console/api/state"
    traced: ASGIApp = OpenTelemetryMiddleware(
        app, excluded_urls=untraced, tracer_provider=spans, exclude_spans=["send", "receive"]
    )
    return traced
