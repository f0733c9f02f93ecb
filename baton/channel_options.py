"""gRPC channel options of all Baton servers and clients, synchronous and asyncio, and the check that both sides of a
call run compatible versions. Pure.

Versions that differ in their first two numbers may read one message differently. A caller therefore sends its version
as its user agent. Servers check it (`baton.transport.status_interceptor`) before calls of workers and operators, and
answers carry the server's version. Generate and GetModel, which clients call, mean the same in all versions and are not
checked.
"""

from dataclasses import dataclass

from baton import __version__
from baton.errors import VersionMismatchError
from baton.limits import MAX_MESSAGE_BYTES

DEFAULT_TARGET = "127.0.0.1:50051"
"""Default address, host:port, of a server on this machine."""

USER_AGENT = f"baton/{__version__}"

Options = tuple[tuple[str, int | str], ...]


def require_version(version: str, peer: str) -> None:
    """Raise VersionMismatchError, which names `peer`, unless this version and the peer's share their first two
    numbers. Empty: the peer did not send its version."""
    if version.split(".")[:2] != __version__.split(".")[:2]:
        has = f"has Baton {version}" if version else "does not say its version of Baton"
        raise VersionMismatchError(f"{peer} {has}, and this side has {__version__}: run one version on both sides")


def version_of(user_agent: str) -> str:
    """Return the version of Baton that a call's user agent names; empty if it names none."""
    product, _, version = user_agent.partition(" ")[0].partition("/")
    return version if product == "baton" else ""


@dataclass(frozen=True)
class Keepalive:
    """Pings by which a connection detects a peer that is gone without closing it (stopped, unplugged)."""

    interval_s: float = 10.0
    """Seconds of silence on a connection after which a ping is sent."""
    timeout_s: float = 5.0
    """Seconds without an answer to a ping after which the connection is dead: its calls end with UNAVAILABLE."""


def channel_options(keepalive: Keepalive) -> Options:
    """Return the options of a client's channel: a connection of its own, renewed within a second of breaking."""
    return (
        *common_options(keepalive),
        ("grpc.primary_user_agent", USER_AGENT),
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
