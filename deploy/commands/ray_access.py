"""Prepares a command for Ray: checks that a Ray answers, detects whether it requires a token, and finds the token.

Called before ray is imported, because Ray reads its environment variables then.
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
"""Method of Ray's head that changes nothing. It is called with an empty request, and its reply is ignored."""


def prepare_to_start(token: Path, host: str) -> None:
    """Prepare the environment for a Ray that Baton starts itself, with the token in the file `token`, for workers on
    the interface `host`."""
    prepare_ray_environment(asks_token=True, token=token, is_local=is_loopback(host))


def prepare_to_join(address: str) -> None:
    """Prepare the environment for joining the Ray at `address`, host:port. If a cluster of this user started that Ray,
    its token is used. Raises UnavailableError if nothing listens at the address, and ConfigError if that Ray requires a
    token and the operator has disabled tokens."""
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
    """Raise UnavailableError if nothing listens on `address`, host:port. Ray itself would retry for minutes."""
    try:
        host, port = host_of(address), address.rpartition(":")[2]
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise UnavailableError(f"Ray at {address} cannot be reached ({error}): check ray.address, host:port") from error


def asks_token(address: str) -> bool:
    """Return whether the Ray at host:port refuses callers without a token. Blocks for at most a few seconds."""
    import grpc  # only a launcher that joins a Ray needs grpc

    with grpc.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel:
        ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_QUESTION)
        try:
            ask(b"", timeout=_ANSWER_S)
        except grpc.RpcError as error:
            return bool(error.code() is grpc.StatusCode.UNAUTHENTICATED)
    return False


def is_loopback(host: str) -> bool:
    """Return whether a host, given as an address or a name, is this machine's loopback interface. Return False for
    unknown names."""
    try:
        addresses = {each[4][0] for each in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(str(each).partition("%")[0]).is_loopback for each in addresses)
