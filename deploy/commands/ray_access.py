"""Prepares a command for Ray: checks that Ray answers, detects whether it requires an authentication token, and finds
the token.

The functions must be called before `ray` is imported, because Ray reads its environment variables during the import.
"""

import ipaddress
import socket
from pathlib import Path

from baton.errors import ConfigError, UnavailableError
from baton.settings.addresses import host_of
from deploy.commands.record import ray_token_of
from deploy.config.environment import prepare_ray_environment, ray_auth_mode

_CONNECT_S = 5.0
_ANSWER_S = 5.0
_QUESTION = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"
"""RPC method of Ray's head node that is called to test whether Ray requires a token. The call has an empty request and
changes nothing, and its reply is ignored."""


def prepare_to_start(token: Path, host: str) -> None:
    """Set the environment variables for a Ray that Baton starts itself. `token` is the file with its authentication
    token, and `host` the address of the interface that workers use."""
    prepare_ray_environment(asks_token=True, token=token, is_local=is_loopback(host))


def prepare_to_join(address: str) -> None:
    """Set the environment variables for joining the Ray at `address` (host:port). If a cluster of this user started
    that Ray, the token that was stored for that Ray is used. Raises UnavailableError if nothing listens at the address.
    Raises ConfigError if Ray requires a token, but the operator has disabled tokens by RAY_AUTH_MODE."""
    require_reachable(address)
    is_asked, mode = asks_token(address), ray_auth_mode()
    if is_asked and mode not in ("", "token"):
        raise ConfigError(
            f"Ray at {address} asks for a token, and RAY_AUTH_MODE is {mode}: unset it, or set it to token"
        )
    token = ray_token_of(address)
    is_local = token is not None and is_loopback(host_of(address))
    prepare_ray_environment(asks_token=is_asked, token=token, is_local=is_local)


def require_reachable(address: str) -> None:
    """Raise UnavailableError if nothing listens on `address` (host:port). Without this check, Ray would retry for
    minutes."""
    try:
        host, port = host_of(address), address.rpartition(":")[2]
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise UnavailableError(f"Ray at {address} cannot be reached ({error}): check ray.address, host:port") from error


def asks_token(address: str) -> bool:
    """Return True if the Ray at `address` (host:port) refuses callers without an authentication token. Blocks for at
    most a few seconds."""
    import grpc  # only a launcher that joins a Ray needs grpc

    with grpc.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel:
        ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_QUESTION)
        try:
            ask(b"", timeout=_ANSWER_S)
        except grpc.RpcError as error:
            return bool(error.code() is grpc.StatusCode.UNAUTHENTICATED)
    return False


def is_loopback(host: str) -> bool:
    """Return True if `host`, an address or a name, is this machine's loopback interface. Return False if the name is
    unknown."""
    try:
        addresses = {each[4][0] for each in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(str(each).partition("%")[0]).is_loopback for each in addresses)
