"""Settings of the HTTP gateway: for which hosts and web pages it answers. Pure."""

import re
from typing import Annotated

from pydantic import AfterValidator

from baton.settings.base import settings

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
Origins = tuple[Annotated[str, AfterValidator(_origin)], ...]


@settings
class HttpRules:
    """Callers that an HTTP gateway answers."""

    allowed_hosts: Hosts = ()
    """Host names that requests may name besides loopback ones; empty: any, if not on loopback without API keys."""
    allow_origins: Origins = ()
    """Origins whose web pages may call, like https://chat.example.com, or * for all; empty: only its own pages."""


DEFAULT_RULES = HttpRules()
