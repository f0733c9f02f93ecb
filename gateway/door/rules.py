"""Settings of the HTTP gateway: permitted hosts, web pages and connections, trusted headers, and timeouts. The module
has no side effects."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from baton.settings.base import Seconds, settings

_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+")


def name_of(authority: str) -> str:
    """Return the host name or address in `authority` (HOST or HOST:PORT), in lower case, without brackets and port."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0].lower()
    return authority.partition(":")[0].lower()


def _host(value: str) -> str:
    host = value.lower()
    if not host or name_of(host) != host or "/" in host:
        raise ValueError(f"{value!r} is not a host name: leave out scheme, port and path")
    return host


def _origin(value: str) -> str:
    if not _ORIGIN.fullmatch(value.lower()):
        raise ValueError(f"{value!r} is not an origin: use one like https://chat.example.com, or *")
    return value.lower()


Hosts = tuple[Annotated[str, AfterValidator(_host)], ...]
TokenAttribution = tuple[Annotated[str, AfterValidator(_origin)], ...]


@settings
class HttpRules:
    """Rules of an HTTP gateway: permitted hosts, origins and connections, trusted headers, and timeouts."""

    allowed_hosts: Hosts = ()
    """Host names allowed in addition to loopback names. Empty: all; on loopback without API keys: no others."""
    allow_origins: TokenAttribution = ()
    """Origins whose web pages may send requests, like https://chat.example.com. *: all; empty: only own pages."""
    default_deadline_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 3600.0
    """Timeout in seconds of a request over HTTP; 0: no timeout."""
    keep_alive_s: Seconds = 75.0
    """Seconds for which an idle connection stays open; use more than the load balancer's idle timeout."""
    max_connections_per_address: Annotated[int, Field(ge=0)] = 0
    """Maximum number of open connections from one address; 0: no limit. A proxy is one address."""
    trust_tenant: bool = False
    """True: pass the header baton-tenant on to the server. For gateways behind a proxy that sets this header."""


DEFAULT_RULES = HttpRules()
