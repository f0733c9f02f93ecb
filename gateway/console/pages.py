"""The console's files: page, style and scripts. They are read once, when the gateway starts. They are served with a
Content-Security-Policy header, which forbids the page to load anything from other sites.

No file is opened by a name from a request: only files that existed when the gateway started are served.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import PurePath
from types import MappingProxyType

from fastapi import Request
from fastapi.responses import Response

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = MappingProxyType(
    {
        "content-security-policy": (
            "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'"
        ),
        "cache-control": "no-cache",  # browsers check each time whether it has changed
        "cross-origin-opener-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
)


@dataclass(frozen=True)
class ConsolePage:
    """File of the console, with its content."""

    content: bytes
    media_type: str
    tag: str
    """Hash of the content (ETag), by which browsers detect changes."""

    def answer(self, request: Request) -> Response:
        """Return the file, or status 304 if the browser already has this version."""
        headers = {**_HEADERS, "etag": self.tag}
        if request.headers.get("if-none-match") == self.tag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


def load_pages() -> Mapping[str, ConsolePage]:
    """Read all files of the console, and return them by name. Blocks."""
    found = {}
    for each in (files("gateway.console") / "static").iterdir():
        media_type = _TYPES.get(PurePath(each.name).suffix)
        if media_type is not None:
            content = each.read_bytes()
            found[each.name] = ConsolePage(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return MappingProxyType(found)
