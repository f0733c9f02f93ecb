"""Refuses requests that a user's browser sends on behalf of a web page of another site. Such requests are recognized by
the headers Host and Origin.

An attacker can let a domain name resolve to 127.0.0.1 (DNS rebinding). The browser then treats the attacker's page and
this server as the same site. Only the header Host, which contains the attacker's domain name, reveals the attack. If
the server requires API keys and no hosts are configured, nothing is refused, because the attacker's page has no key.
"""

from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.errors import BatonError, InvalidArgumentError, PermissionDeniedError
from gateway.door.access import Access
from gateway.door.rules import HttpRules, name_of
from gateway.errors import WrongHostError, error_body, status_of

_OPEN = ("/health", "/ready", "/metrics")
"""Paths that are answered for any host name or address, because health probes use them."""


class HostCheck:
    """Middleware that checks the headers Host and Origin. A Host that is not allowed gets status 421. An Origin that is
    neither the server itself nor allowed gets status 403.

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


class CrossOrigin(CORSMiddleware):
    """Starlette's middleware for web pages of other origins (CORS), with refusals in OpenAI's format."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """Answer a browser that checks whether a page may send a request."""
        answer = super().preflight_response(request_headers)
        if answer.status_code == 200:
            return answer
        error = InvalidArgumentError(f"{bytes(answer.body).decode()}: use an allowed one, or set http.allow_origins")
        kept = {name: value for name, value in answer.headers.items() if not name.startswith("content-")}
        return JSONResponse(error_body(error), status_of(error), headers=kept)


def is_loopback(host: str) -> bool:
    """Return True if `host` is localhost or a loopback address, which only this machine can reach."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
