"""Serves the metrics for Prometheus over HTTP, at the path /metrics on a separate port and in separate threads.

Started by `orchestrator.api.frontend`. Each scrape requests the state of the cluster once from the event loop (see
`orchestrator.observability.cluster_metrics`). All other metrics are read on the scrape's thread. Created and stopped on
the event loop.
"""

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Self
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

from baton.calls.cluster_state import ClusterState
from baton.errors import ConfigError
from baton.settings.addresses import join_address
from orchestrator.observability.cluster_metrics import StateCollector

_ANSWER_S = 5.0
"""Timeout in seconds for reading the cluster's state from the event loop. The scrape fails after this time."""


class MetricsServer:
    """HTTP server that exports one metrics registry. Create it with `start`, on the event loop."""

    def __init__(self, server: WSGIServer, thread: threading.Thread, host: str) -> None:
        self.port: int = server.server_port
        self.endpoint = join_address(host, self.port)
        self._server = server
        self._thread = thread

    @classmethod
    async def start(
        cls, registry: CollectorRegistry, read: Callable[[], ClusterState], *, host: str, port: int
    ) -> Self:
        """Start a server for the metrics in `registry` and for the cluster state that `read` returns. `read` is called
        on the event loop. If `port` is 0, the system selects a free port.

        Raises ConfigError if the server cannot listen on this address.
        """
        loop = asyncio.get_running_loop()

        async def read_on_loop() -> ClusterState:
            return read()

        def read_anywhere() -> ClusterState:
            return asyncio.run_coroutine_threadsafe(read_on_loop(), loop).result(_ANSWER_S)

        registry.register(StateCollector(read_anywhere))
        try:
            server, thread = await asyncio.to_thread(start_http_server, port, host.strip("[]"), registry)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {join_address(host, port)} for metrics ({error}): choose another metrics_port, "
                "0 for any free one, or -1 for none"
            ) from error
        return cls(server, thread, host)

    async def stop(self) -> None:
        """Stop listening and wait until the server's thread has ended. Idempotent."""
        await asyncio.to_thread(self._shut_down)

    def _shut_down(self) -> None:
        if self._thread.is_alive():
            self._server.socket.shutdown(socket.SHUT_RDWR)  # ends the thread's poll, which takes up to 0.5 s
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
