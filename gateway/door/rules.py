"""Settings of the HTTP gateway: for which hosts and web pages it answers, and for how long. Pure."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from baton.settings.base import Seconds, settings

_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+")


def name_of(authority: str) -> str:
    """Return the name or address of a host, in lower case, without brackets and port."""
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
    """Rules of an HTTP gateway: permitted hosts and origins, and timeouts of requests and connections."""

    allowed_hosts: Hosts = ()
    """Allowed values of Host, in addition to loopback names; empty: any, except on loopback without API keys."""
    allow_origins: TokenAttribution = ()
    """Origins whose web pages may call, like https://chat.example.com, or * for all; empty: only its own pages."""
    default_deadline_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 3600.0
    """Seconds after which a request over HTTP ends; 0: never."""
    keep_alive_s: Seconds = 75.0
    """Seconds for which an idle connection stays open; use more than the load balancer's idle timeout."""


DEFAULT_RULES = HttpRules()
