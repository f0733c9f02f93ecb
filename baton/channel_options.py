"""gRPC channel options that all of Baton's servers and clients share, synchronous and asyncio. Pure."""

from dataclasses import dataclass

DEFAULT_TARGET = "127.0.0.1:50051"
"""host:port where a server on this machine is looked for."""
MAX_MESSAGE_BYTES = 16 * 2**20

Options = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Keepalive:
    """How a peer that is gone without a word (stopped, unplugged) is found out."""

    interval_s: float = 10.0
    """Seconds of silence on a connection after which a ping is sent."""
    timeout_s: float = 5.0
    """Seconds without an answer to it after which the connection is dead: its calls end with UNAVAILABLE."""


def channel_options(keepalive: Keepalive) -> Options:
    """Options of a client's channel, with a connection of its own; it is made anew within a second when it breaks."""
    return (
        *common_options(keepalive),
        # Else channels to one target share a connection, and tokens queue behind megabytes of KV.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 5000),  # in spite of its name: how long one attempt may take
        ("grpc.max_reconnect_backoff_ms", 1000),
    )


def common_options(keepalive: Keepalive) -> Options:
    """Options of both sides: message size, and the pings that find out a dead peer."""
    return (
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", int(keepalive.interval_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(keepalive.timeout_s * 1000)),
        # The same again: without it gRPC waits a minute for the answer to a ping, whatever the line above says.
        ("grpc.http2.ping_timeout_ms", int(keepalive.timeout_s * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
    )
