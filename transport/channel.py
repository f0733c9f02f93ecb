"""Servers and channels of all of Baton's processes: made alike, for thousands of calls in flight and dead peers.

Called on the process's asyncio loop, which then owns the server or channel.
"""

import grpc

from baton.channel_options import MAX_MESSAGE_BYTES as MAX_MESSAGE_BYTES
from baton.channel_options import Keepalive as Keepalive
from baton.channel_options import channel_options, common_options
from baton.errors import ConfigError
from transport.status import Check, StatusInterceptor

MAX_PENDING_CALLS = 16_384
"""Calls that may wait for the loop to accept them: beyond, gRPC refuses. Its own default cancels calls from 1,000."""
MAX_PENDING_S = 3600
"""Seconds that a call may wait so: gRPC's own default cancels it after 30, and nobody asks again for what was
cancelled."""


def make_server(keepalive: Keepalive | None = None, *, check: Check | None = None) -> grpc.aio.Server:
    """A server whose methods may raise BatonErrors (transport.status). Add servicers, `bind` it, then start it. `check`
    is asked before each call, and raises to refuse it."""
    return grpc.aio.server(
        interceptors=(StatusInterceptor(check),),
        options=(
            *common_options(keepalive or Keepalive()),
            ("grpc.so_reuseport", 0),
            ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
            ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_PENDING_CALLS),
            ("grpc.server_max_unrequested_time_in_server", MAX_PENDING_S),
            # Clients may ping as often as `make_channel` tells them to, with and without calls.
            ("grpc.http2.min_ping_interval_without_data_ms", 500),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
            ("grpc.http2.max_ping_strikes", 0),
        ),
    )


def bind(server: grpc.aio.Server, host: str, port: int = 0) -> int:
    """Opens host:port for the server and returns the port; 0 takes any free one. Raises ConfigError when it cannot."""
    try:
        return server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: the port is in use or the address is not this machine's; "
            "choose another, or port 0 for any free one"
        ) from error


def make_channel(target: str, keepalive: Keepalive | None = None) -> grpc.aio.Channel:
    """A channel to host:port with a connection of its own; connects at the first call, and again when it breaks."""
    return grpc.aio.insecure_channel(target, options=channel_options(keepalive or Keepalive()))
