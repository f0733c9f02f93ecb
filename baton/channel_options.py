"""gRPC channel options that all of Baton's servers and clients share, synchronous and asyncio. Pure."""

from dataclasses import dataclass

DEFAULT_TARGET = "127.0.0.1:50051"
"""Default address, host:port, of a server on this machine."""
MAX_MESSAGE_BYTES = 16 * 2**20

Options = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Keepalive:
    """How soon a connection notices that its peer is gone without closing it (stopped, unplugged)."""

    interval_s: float = 10.0
    """Seconds of silence on a connection after which a ping is sent."""
    timeout_s: float = 5.0
    """Seconds without an answer to a ping after which the connection is dead: its calls end with UNAVAILABLE."""


def channel_options(keepalive: Keepalive) -> Options:
    """Return the options of a client's channel. The channel has a connection of its own, and reconnects within a second
    after it breaks."""
    return (
        *common_options(keepalive),
        # Without this, channels to one target share a connection, and tokens queue behind megabytes of KV.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 5000),  # despite its name: how long one attempt may take
        ("grpc.max_reconnect_backoff_ms", 1000),
    )


def common_options(keepalive: Keepalive) -> Options:
    """Return the options that clients and servers share: message size, and the pings that detect a dead peer."""
    return (
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", int(keepalive.interval_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(keepalive.timeout_s * 1000)),
        # The timeout once more: without this option gRPC waits a minute for the answer to a ping.
        ("grpc.http2.ping_timeout_ms", int(keepalive.timeout_s * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
    )
