"""Chooses the network interface of a node on which the orchestrator serves, and the address at which clients reach
it."""

import ipaddress
import socket

from deploy.ray_cluster.ray_worker import node_address


def serving_host(host: str) -> str:
    """Return the address on this node at which the orchestrator listens for clients. This is `host`, the configured
    address, if `host` is an address of this node or stands for all interfaces (for example 0.0.0.0). Otherwise it is
    this node's address."""
    return host if _is_own(host) else node_address()


def client_host(host: str) -> str:
    """Return the address at which clients reach an orchestrator on this node. `host` is the configured address to serve
    on. If `host` means all interfaces (for example 0.0.0.0), return this node's address."""
    own = serving_host(host)
    return node_address() if _is_wildcard(own) else own


def _is_wildcard(host: str) -> bool:
    """Return whether `host` stands for all interfaces of a machine, as 0.0.0.0 does."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:  # not an address, but a name
        return False


def _is_own(host: str) -> bool:
    """Return whether `host` is the address of an interface of this machine, or stands for all of its interfaces."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, address in found:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
    except OSError:
        return False
    return True
