"""Decides which callers may call a method on the clients' port. A method is open to all callers, callers with a key,
processes of the cluster, or operators.

Called before each call by the server's interceptor (`baton.transport.status_interceptor`), which
`orchestrator.api.frontend` installs. The caller's address is not checked, because a local call may come from a proxy
for any client, or from another user of the machine. docs/security.md has the rules as a table. Does no I/O.
"""

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from baton.errors import UnauthenticatedError
from baton.transport.identity import ClusterSecret
from orchestrator.requests.tenants import AUTHORIZATION_KEY, Metadata, Tenants


class AllowedCallers(Enum):
    """Group of callers that may call a method."""

    ANYBODY = "anybody"
    """Every caller that reaches the port."""
    CALLERS = "callers"
    """All callers. If `require_api_key` is set, only callers that send a key, or the name of a trusted tenant."""
    OPERATORS = "operators"
    """Callers that have the cluster's secret and, if keys for operators are configured, an operator's key."""


METHODS: Mapping[str, AllowedCallers] = MappingProxyType(
    {
        "/grpc.health.v1.Health/Check": AllowedCallers.ANYBODY,
        "/grpc.health.v1.Health/Watch": AllowedCallers.ANYBODY,
        "/grpc.health.v1.Health/List": AllowedCallers.ANYBODY,
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": AllowedCallers.CALLERS,
        "/baton.v1.Orchestrator/Generate": AllowedCallers.CALLERS,
        "/baton.v1.Orchestrator/GetModel": AllowedCallers.CALLERS,
        "/baton.v1.Orchestrator/GetClusterState": AllowedCallers.CALLERS,
        "/baton.v1.Orchestrator/GetRequests": AllowedCallers.CALLERS,
        "/baton.v1.Admin/Drain": AllowedCallers.OPERATORS,
        "/baton.v1.Admin/Undrain": AllowedCallers.OPERATORS,
        "/baton.v1.Admin/StandIn": AllowedCallers.OPERATORS,
        "/baton.v1.Admin/Flip": AllowedCallers.OPERATORS,
        "/baton.v1.Admin/GetTrace": AllowedCallers.OPERATORS,
    }
)
"""Callers that may call each method. A method that is not listed is open only to operators."""


def check_access(tenants: Tenants, secret: ClusterSecret, method: str, metadata: Metadata) -> None:
    """Raise an error if the caller may not call `method`, the full name of a gRPC method. The server's interceptor
    calls this function with `tenants` and `secret` already bound, as a `baton.transport.status_interceptor.Check`.

    Raises UnauthenticatedError if a required key or secret is missing or unknown. Raises PermissionDeniedError if an
    operator's key is required and the caller sends a tenant's key.
    """
    access = METHODS.get(method, AllowedCallers.OPERATORS)
    if access is AllowedCallers.CALLERS and tenants.require_key:
        tenants.of(metadata)
    if access is AllowedCallers.OPERATORS and not tenants.is_operator(metadata) and tenants.operator_hashes:
        name = method.rpartition("/")[2]
        raise UnauthenticatedError(
            f"{name} is for operators: send an operator's key as {AUTHORIZATION_KEY}: Bearer KEY"
        )
    if access is AllowedCallers.OPERATORS:
        secret.check(method, metadata)
