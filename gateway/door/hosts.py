"""Refuses requests that a web page of another site makes a user's browser send. They are recognized by the headers Host
and Origin.

If the owner of a domain name maps it to 127.0.0.1 (DNS rebinding), a browser treats the owner's page and this server as
the same site, and only the header Host distinguishes them. If the server requires API keys, nothing is refused, because
a foreign page has no key.
"""

from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.errors import BatonError, PermissionDeniedError
from gateway.door.access import Access
from gateway.door.rules import HttpRules, name_of
from gateway.errors import WrongHostError, error_body, status_of

_OPEN = ("/health", "/ready", "/metrics")
"""Paths that health probes may request with any host name or address."""


class HostCheck:
    """Answers 421 for a Host that is not allowed, and 403 for an Origin that is neither the host nor allowed.

    If `allowed_hosts` is set, both headers are always checked. If it is empty, they are checked only if the server
    listens on loopback and requires no key.
    """

    def __init__(self, app: ASGIApp, rules: HttpRules, access: Access, *, is_loopback: bool) -> None:
        self._app, self._rules, self._access = app, rules, access
        self._is_checking = is_loopback or bool(rules.allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http" and self._is_checking and scope["path"] not in _OPEN:
            error = self._refusal(Headers(scope=scope))
            if error is not None and (self._rules.allowed_hosts or not await self._access.requires_key()):
                await JSONResponse(error_body(error), status_of(error))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers) -> BatonError | None:
        hosts = headers.getlist("host")  # browsers always send a Host
        for host in hosts:
            if not (is_loopback(name_of(host)) or name_of(host) in self._rules.allowed_hosts):
                return WrongHostError(f"host {host!r:.80} is not allowed: use localhost, or set http.allowed_hosts")
        for origin in headers.getlist("origin"):
            is_own = origin.lower().partition("://")[2] in [host.lower() for host in hosts]
            if not is_own and not {origin.lower(), "*"} & set(self._rules.allow_origins):
                return PermissionDeniedError(f"origin {origin!r:.80} is not allowed: set http.allow_origins")
        return None


def is_loopback(host: str) -> bool:
    """Return whether a host's name or address can only mean this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
