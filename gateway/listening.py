"""Opens the socket on which HTTP is served. Either the server's own process opens it, or a launcher that passes it to
the server.

A launcher keeps the socket open while it restarts the server, so that the address does not change. The module imports
no code of the server.
"""

import socket

from baton.errors import ConfigError
from baton.settings.addresses import join_address


def open_socket(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to `host` and `port`, but does not listen yet. Port 0 selects a free port. Raises
    ConfigError when the address cannot be bound."""
    try:
        return _bound(host, port)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {join_address(host, port)} ({error.strerror}): "
            "choose another, or port 0 for any free one"
        ) from error


def _bound(host: str, port: int) -> socket.socket:
    family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
    opened = socket.socket(family, kind)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
    except OSError:
        opened.close()
        raise
    return opened
