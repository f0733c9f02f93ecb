"""gRPC channel options of all Baton servers and clients, and the version check between both sides of a call. Does no
I/O.

Versions are compatible if their first two numbers are equal. A caller sends its version as its user agent. Servers
check it (`baton.transport.status_interceptor`) before they run calls of workers and operators, and send their own
version in the answer. The version of a caller of Generate or GetModel is not checked: these calls have the same meaning
in all versions, so that clients of any version can use them.
"""

from dataclasses import dataclass

from baton import __version__
from baton.errors import VersionMismatchError
from baton.limits import MAX_MESSAGE_BYTES

DEFAULT_TARGET = "127.0.0.1:50051"
"""Default address (host:port) of a server on the local machine."""

USER_AGENT = f"baton/{__version__}"

Options = tuple[tuple[str, int | str], ...]


def require_version(version: str, peer: str) -> None:
    """Raise VersionMismatchError unless the first two numbers of `version` and of this process's version are equal.
    `version` is the peer's version, or empty if the peer did not send it. `peer` names the peer in the error."""
    if version.split(".")[:2] != __version__.split(".")[:2]:
        has = f"has Baton {version}" if version else "does not say its version of Baton"
        raise VersionMismatchError(f"{peer} {has}, and this side has {__version__}: run one version on both sides")


def version_of(user_agent: str) -> str:
    """Return the version of Baton in a call's user agent. Empty if the user agent contains no version of Baton."""
    product, _, version = user_agent.partition(" ")[0].partition("/")
    return version if product == "baton" else ""


@dataclass(frozen=True)
class Keepalive:
    """Settings of keepalive pings. Pings detect a peer that has disappeared without closing the connection, for example
    because its machine lost power."""

    interval_s: float = 10.0
    """Seconds without traffic on a connection after which a ping is sent."""
    timeout_s: float = 5.0
    """Seconds to wait for the answer to a ping. After this time the connection is considered dead, and its calls end
    with UNAVAILABLE."""


def channel_options(keepalive: Keepalive) -> Options:
    """Return the gRPC options of a client's channel. The channel has its own connection. If the connection breaks, the
    channel reconnects, and waits about one second or less between two attempts."""
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
    """Return the gRPC options that clients and servers share: the maximum message size, and the keepalive pings that
    detect a dead peer."""
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
