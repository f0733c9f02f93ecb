"""Lightweight HTTP client for streamed answers. It sends one POST request, and reads a chunked stream of server-sent
events.

Runs on the caller's event loop. Its work per event is similar to that of gRPC's client, so that HTTP and gRPC servers
can be compared fairly.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

_DATA = b"data: "
_DONE = b"[DONE]"


class EventStream:
    """Connection to an HTTP server on this machine. It is used for one request. Create with `connected`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        self._reader = reader
        self._writer = writer
        self._host = host

    @classmethod
    @contextlib.asynccontextmanager
    async def connected(cls, host: str, port: int) -> AsyncIterator["EventStream"]:
        """Context manager. Connect to the server and yield the connection. The connection is closed on exit, which ends
        a request that is still running."""
        reader, writer = await asyncio.open_connection(host, port)
        try:
            yield cls(reader, writer, f"{host}:{port}")
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):  # the server closed it first
                await writer.wait_closed()

    async def post(self, path: str, body: object) -> AsyncIterator[dict[str, Any]]:
        """Send `body` as JSON, and yield the JSON of each event as it arrives. Raises RuntimeError if the status is not
        200, or if the answer is not chunked or ends too early."""
        data = json.dumps(body, separators=(",", ":")).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        self._writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
        await self._read_head()
        waiting = b""
        async for chunk in self._chunks():
            *events, waiting = (waiting + chunk).split(b"\n\n")
            for event in events:
                text = event.removeprefix(_DATA)
                if text == _DONE:
                    return
                yield json.loads(text)
        raise RuntimeError(f"the stream of {self._host} ended without {_DONE.decode()}: see the server's output")

    async def _read_head(self) -> None:
        status, *headers = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        names = {line.partition(":")[0].lower(): line.partition(":")[2].strip().lower() for line in headers}
        if status.split()[1] != "200" or names.get("transfer-encoding") != "chunked":
            answer = (await self._reader.read(500)).decode(errors="replace")
            raise RuntimeError(f"{self._host} answers {status!r}, not a stream: {answer!r}")

    async def _chunks(self) -> AsyncIterator[bytes]:
        while size := int(await self._reader.readline() or b"0", 16):
            yield (await self._reader.readexactly(size + 2))[:-2]
