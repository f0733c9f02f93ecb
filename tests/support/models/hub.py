"""A model hub on 127.0.0.1. It implements the part of the Hugging Face hub's API that its client needs to find and
download a model."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Contents and behaviour of a hub. The test changes them, and the server's threads read them."""

    repositories: dict[str, Path] = field(default_factory=dict)
    """Folder of each repository."""
    gated: set[str] = field(default_factory=set)
    """Repositories whose access is denied."""
    cuts: dict[str, int] = field(default_factory=dict)
    """Number of further times that the connection is cut during the transfer of a file, by file name."""
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    """Requests received: method, path without the repository, and range."""
    endpoint: str = ""

    def fetched(self) -> list[str]:
        """Return the files that were sent completely or partially."""
        return [path.rpartition("/")[2] for method, path, _ in self.asked if method == "GET" and "/resolve/" in path]


class _Handler(BaseHTTPRequestHandler):
    """Handler of one connection."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path, self.headers.get("Range")))
        is_api = path.startswith("/api/models/")
        parts = path.removeprefix("/api/models/").strip("/").split("/")
        repository, rest = "/".join(parts[:2]), parts[2:]
        folder = self.hub.repositories.get(repository)
        if folder is None or repository in self.hub.gated:
            code = "RepoNotFound" if folder is None else "GatedRepo"
            self._send(404 if folder is None else 403, b"{}", {"X-Error-Code": code})
        elif rest[1:2] not in (["main"], [COMMIT]):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif is_api and rest[0] == "tree":
            files = sorted(each for each in folder.rglob("*") if each.is_file())
            self._send_json([_entry(each, str(each.relative_to(folder))) for each in files])
        elif is_api:
            self._send_json({"id": repository, "sha": COMMIT, "siblings": [], "tags": [], "private": False})
        else:
            self._send_file(folder / "/".join(rest[2:]))

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send_file(self, path: Path) -> None:
        if not path.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        content, wanted = path.read_bytes(), self.headers.get("Range")
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_etag(content)}"', "Accept-Ranges": "bytes"}
        if wanted:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._send(206 if wanted else 200, content[start:], headers, cut=self._is_cut(path.name))

    def _is_cut(self, name: str) -> bool:
        if self.command != "GET" or not self.hub.cuts.get(name):
            return False
        self.hub.cuts[name] -= 1
        return True

    def _send(self, status: int, content: bytes, headers: dict[str, str], *, cut: bool = False) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if cut else content)
        self.close_connection = self.close_connection or cut


def _entry(path: Path, name: str) -> dict[str, object]:
    return {"type": "file", "path": name, "size": path.stat().st_size, "oid": _etag(path.read_bytes())}


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def serving(hub: Hub) -> Iterator[None]:
    """Serve the hub at `hub.endpoint` inside the context."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, name="hub")
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
