"""Decides who may call which method of the clients' port: any caller, callers with a key, or operators only.

Called before each call, by the server's interceptor (`transport.status`), which `orchestrator.api.frontend` installs.
Where operators have keys, or all calls must have one, addresses do not count: a call from this machine may come from a
proxy, on behalf of any client. docs/tenants.md has the rules as a table. Pure.
"""

import ipaddress
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from urllib.parse import unquote

from baton.errors import UnauthenticatedError
from orchestrator.requests.tenants import AUTHORIZATION_KEY, Metadata, Tenants, values_of


class Access(Enum):
    """The callers that may call a method."""

    ANYBODY = "anybody"
    """Every caller that reaches the port."""
    CALLERS = "callers"
    """Every caller; with `require_api_key`, only callers with a key or a trusted tenant's name."""
    OPERATORS = "operators"
    """Callers with an operator's key; also processes of this machine, unless `Tenants.goes_by_keys`."""


METHODS: Mapping[str, Access] = MappingProxyType(
    {
        "/grpc.health.v1.Health/Check": Access.ANYBODY,
        "/grpc.health.v1.Health/Watch": Access.ANYBODY,
        "/grpc.health.v1.Health/List": Access.ANYBODY,
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Access.CALLERS,
        "/baton.v1.Orchestrator/Generate": Access.CALLERS,
        "/baton.v1.Orchestrator/GetModel": Access.CALLERS,
        "/baton.v1.Orchestrator/GetClusterState": Access.CALLERS,
        "/baton.v1.Planning/GetCalibration": Access.CALLERS,
        "/baton.v1.Planning/GetStepTimes": Access.CALLERS,
        "/baton.v1.Planning/UseCalibration": Access.OPERATORS,
        "/baton.v1.Planning/UseStepTimes": Access.OPERATORS,
        "/baton.v1.Admin/Drain": Access.OPERATORS,
        "/baton.v1.Admin/Undrain": Access.OPERATORS,
        "/baton.v1.Admin/StandIn": Access.OPERATORS,
    }
)
"""Access to each method that is served; a method that is missing here is for operators."""

FORWARDED_KEYS = ("forwarded", "via", "x-forwarded-for", "x-real-ip")
"""Metadata by which proxies say that they call on behalf of another caller."""


class Doorkeeper:
    """Checks calls before they are served. Read-only after it is made."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants

    def check(self, method: str, metadata: Metadata, peer: str) -> None:
        """Return if the call may go on: `method` is its full name, `peer` is the caller's address as gRPC writes it.

        Raises UnauthenticatedError without a required key, and PermissionDeniedError for a tenant's key where an
        operator's is required.
        """
        access = METHODS.get(method, Access.OPERATORS)
        if access is Access.CALLERS and self._tenants.require_key:
            self._tenants.of(metadata)
        if access is Access.OPERATORS:
            self._require_operator(method, metadata, peer)

    def _require_operator(self, method: str, metadata: Metadata, peer: str) -> None:
        if self._tenants.is_operator(metadata):
            return
        is_forwarded = any(key in values_of(metadata) for key in FORWARDED_KEYS)
        if not self._tenants.goes_by_keys and not is_forwarded and is_local(peer):
            return
        name = method.rpartition("/")[2]
        remedy = f"send an operator's key as {AUTHORIZATION_KEY}: Bearer KEY"
        if not self._tenants.has_operators:
            remedy = f"name a key in orchestrator.operator_keys, and {remedy}"
        raise UnauthenticatedError(f"{name} is for operators: {remedy}")


def is_local(peer: str) -> bool:
    """Return whether a peer, as ipv4:127.0.0.1:5000 or ipv6:%5B::1%5D:5000, calls by loopback or a Unix socket."""
    kind, _, rest = unquote(peer).partition(":")
    if kind in ("unix", "unix-abstract"):
        return True
    if kind not in ("ipv4", "ipv6"):
        return False
    host = rest.rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
