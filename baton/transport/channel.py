"""Creates the gRPC servers and channels of all Baton processes. They are configured for thousands of calls, and for
peers that may crash.

Used by `orchestrator.api`, `orchestrator.workers.client`, the servicers of prefill and generation workers, and
`deploy`. Called on the process's asyncio loop, which then owns the server or channel.
"""

from types import TracebackType
from typing import Any, Self

import grpc

from baton.channel_options import Keepalive as Keepalive
from baton.channel_options import channel_options, common_options
from baton.errors import ConfigError
from baton.limits import MAX_PENDING_CALLS, MAX_PENDING_S
from baton.settings.addresses import join_address
from baton.transport.identity import ClusterSecret
from baton.transport.status_interceptor import Check, StatusInterceptor
from baton.transport.terms import NO_TERM, term_metadata


def make_server(keepalive: Keepalive | None = None, *, check: Check | None = None) -> grpc.aio.Server:
    """Return a server whose methods may raise BatonErrors, which are converted to gRPC statuses. `check` is called
    before each call and may reject it. For example, `ClusterSecret.check` rejects callers that do not belong to the
    cluster.

    The caller adds servicers, calls `bind`, and then starts the server.
    """
    return grpc.aio.server(
        interceptors=(StatusInterceptor(check),),
        options=(
            *common_options(keepalive or Keepalive()),
            ("grpc.so_reuseport", 0),
            # gRPC's own limits, 1,000 calls and 30 s, would end calls of a busy server, which are not retried.
            ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
            ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_PENDING_CALLS),
            ("grpc.server_max_unrequested_time_in_server", MAX_PENDING_S),
            # Clients may ping as often as `make_channel` makes them, with and without calls.
            ("grpc.http2.min_ping_interval_without_data_ms", 500),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
            ("grpc.http2.max_ping_strikes", 0),
        ),
    )


def bind(server: grpc.aio.Server, host: str, port: int = 0) -> int:
    """Bind the server to host:port and return the port. Port 0 selects any free port. Raises ConfigError if the port
    cannot be bound."""
    try:
        return server.add_insecure_port(join_address(host, port))
    except RuntimeError as error:
        raise ConfigError(
            f"cannot listen on {join_address(host, port)}: the port is in use or the address is not this machine's; "
            "choose another, or port 0 for any free one"
        ) from error


def make_channel(
    target: str, keepalive: Keepalive | None = None, *, secret: ClusterSecret | None = None, term: int = NO_TERM
) -> grpc.aio.Channel:
    """Return a channel to the address host:port. The channel has its own connection, which is opened at the first call
    and reopened automatically.

    `secret` is sent with each call, and proves that the caller belongs to the cluster. Pass it only for servers of the
    same cluster. `term` is the orchestrator's term, if the caller is an orchestrator. It is sent together with the
    secret.
    """
    channel = grpc.aio.insecure_channel(target, options=channel_options(keepalive or Keepalive()))
    return channel if secret is None else IdentifiedChannel(channel, secret.metadata + term_metadata(term))


class IdentifiedChannel(grpc.aio.Channel):
    """Channel that wraps another channel and adds metadata to each of its calls. It owns the wrapped channel."""

    def __init__(self, inner: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...]) -> None:
        self._inner = inner
        self._metadata = metadata

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._inner.__aexit__(kind, error, traceback)

    async def close(self, grace: float | None = None) -> None:
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner.channel_ready()

    def unary_unary(self, method: str, *args: Any, **options: Any) -> Any:
        """Return a callable for a method with one request and one reply."""
        return self._identified(self._inner.unary_unary(method, *args, **options))

    def unary_stream(self, method: str, *args: Any, **options: Any) -> Any:
        """Return a callable for a method with one request and a stream of replies."""
        return self._identified(self._inner.unary_stream(method, *args, **options))

    def stream_unary(self, method: str, *args: Any, **options: Any) -> Any:
        """Return a callable for a method with a stream of requests and one reply."""
        return self._identified(self._inner.stream_unary(method, *args, **options))

    def stream_stream(self, method: str, *args: Any, **options: Any) -> Any:
        """Return a callable for a method with a stream of requests and a stream of replies."""
        return self._identified(self._inner.stream_stream(method, *args, **options))

    def _identified(self, call: Any) -> Any:
        def identified(*args: Any, metadata: Any = (), **options: Any) -> Any:
            return call(*args, metadata=(*(metadata or ()), *self._metadata), **options)

        return identified
