"""Serves the metrics for Prometheus over HTTP: the path /metrics on a separate port, answered by separate threads.

Started by `orchestrator.api.frontend`. Each scrape requests the state of the cluster once from the event loop
(`orchestrator.observability.cluster_metrics`). All other metrics are read on the scrape's thread. Made and stopped on
the loop.
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
"""Seconds within which the loop must return the cluster's state. Otherwise the scrape fails."""


class MetricsServer:
    """HTTP server of one registry. Make it with `start`, on the loop."""

    def __init__(self, server: WSGIServer, thread: threading.Thread, host: str) -> None:
        self.port: int = server.server_port
        self.endpoint = join_address(host, self.port)
        self._server = server
        self._thread = thread

    @classmethod
    async def start(
        cls, registry: CollectorRegistry, read: Callable[[], ClusterState], *, host: str, port: int
    ) -> Self:
        """Serve `registry` and the state that `read` returns. `read` is called on the loop. Port 0 selects any free
        port.

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
