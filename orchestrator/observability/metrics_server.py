"""The metrics over HTTP, for Prometheus: /metrics on a port of its own, answered by threads of its own.

Each scrape asks the loop once for the state of the cluster; all else is read where it lies. Made and stopped on the
loop.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import Self
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

from baton.errors import ConfigError
from baton.results import ClusterState
from orchestrator.observability.cluster_metrics import StateCollector

_ANSWER_S = 5.0
"""For the loop to say how things stand; a scrape that gets no answer fails, and Prometheus shows it."""


class MetricsServer:
    """Serves one registry. Make one with `start`, on the loop."""

    def __init__(self, server: WSGIServer, thread: threading.Thread, host: str) -> None:
        self.port: int = server.server_port
        self.endpoint = f"{host}:{self.port}"
        self._server = server
        self._thread = thread

    @classmethod
    async def start(
        cls, registry: CollectorRegistry, read: Callable[[], ClusterState], *, host: str, port: int
    ) -> Self:
        """Serves `registry` and what `read` gives, which is called on the loop. Port 0 takes any free one. Raises
        ConfigError when it cannot listen there."""
        loop = asyncio.get_running_loop()

        async def read_on_loop() -> ClusterState:
            return read()

        def read_anywhere() -> ClusterState:
            return asyncio.run_coroutine_threadsafe(read_on_loop(), loop).result(_ANSWER_S)

        registry.register(StateCollector(read_anywhere))
        try:
            server, thread = await asyncio.to_thread(start_http_server, port, host, registry)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port} for metrics ({error}): choose another metrics_port, 0 for any free "
                "one, or -1 for none"
            ) from error
        return cls(server, thread, host)

    async def stop(self) -> None:
        """Listens no more. Idempotent."""
        await asyncio.to_thread(self._shut_down)

    def _shut_down(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
