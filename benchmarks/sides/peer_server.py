"""Server with OpenAI's API that Baton is compared with (peer). The server is started in its own environment, called,
and ended.

`benchmarks.sides.peer_commands` creates a Peer for each supported server.
"""

import asyncio
import collections
import contextlib
import json
import os
import signal
import socket
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection
from time import time_ns

from benchmarks.sides.front_doors import checked
from benchmarks.support.answers import Answer, Answered, Ask
from benchmarks.support.event_stream import EventStream
from benchmarks.support.processor_time import with_descendants

HOST = "127.0.0.1"
MODEL = "model"
"""Model name under which the peers serve the model."""
_HEALTH = "/health"
"""HTTP path that returns status 200 when the server is ready. While the server loads, it returns another status or does
not accept connections."""
_POLL_S, _ANSWER_S, _END_S = 0.25, 5.0, 30.0
_NUM_LINES = 20


@dataclass(frozen=True)
class Peer:
    """Description of a server that Baton is compared with: how to start it, and the parts of its API that differ
    between servers."""

    name: str
    """Name of the server, which is also the name of the baseline in output rows."""
    weights: str
    """Format of the weights used for computation."""
    command: Sequence[str]
    """Command that serves the model under the name MODEL. The options `--host` and `--port` are appended."""
    version: tuple[str, str]
    """Location of the server's version: (HTTP path of a JSON document, name of the field with the version)."""
    count: tuple[str, str]
    """Location of the token count in a stream's JSON messages: (name of a nested object, name of the field of this
    object that has the number of output tokens so far)."""
    fields: Mapping[str, object]
    """Fields of a request that only this server receives, in addition to the fields that all servers receive."""


class PeerDoor:
    """Client interface of a running peer (server that Baton is compared with). Implements FrontDoor
    (`benchmarks.support.answers`)."""

    def __init__(self, peer: Peer, port: int, version: str, pid: int) -> None:
        """Connect to a running peer on `port`. `pid` is the root of the server's process tree."""
        self._peer = peer
        self._port = port
        self._pid = pid
        self.version = version

    async def answer(self, asks: Sequence[Ask]) -> Answered:
        async with contextlib.AsyncExitStack() as stack:
            streams = [await stack.enter_async_context(EventStream.connected(HOST, self._port)) for _ in asks]
            answers = (self._one(stream, each) for stream, each in zip(streams, asks, strict=True))
            return Answered(await asyncio.gather(*answers))

    def pids(self) -> set[int]:
        return with_descendants([self._pid])

    async def _one(self, stream: EventStream, ask: Ask) -> Answer:
        await asyncio.sleep(ask.at_s)  # from the load's start
        asked_ns, message_ns, num_tokens = time_ns(), list[int](), 0
        body = {
            "model": MODEL,
            "prompt": ask.prompt,
            "max_tokens": ask.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            **self._peer.fields,
        }
        counts, name = self._peer.count
        async for event in stream.post("/v1/completions", body):
            if counts not in event:
                raise RuntimeError(f"{self._peer.name} answers {event}, not a message with {counts!r}")
            if event[counts][name] > num_tokens:
                num_tokens = event[counts][name]
                message_ns.append(time_ns())
        return checked(Answer(asked_ns, tuple(message_ns), num_tokens), ask)


@contextlib.asynccontextmanager
async def peer_server(peer: Peer) -> AsyncIterator[PeerDoor]:
    """Context manager. Start a peer and yield its client interface when the peer is ready, which may take minutes. All
    processes of the peer are ended on exit. Raises RuntimeError with the peer's last output lines if the peer ends
    before it is ready."""
    port = _free_port()
    command = [*peer.command, "--host", HOST, "--port", str(port)]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, start_new_session=True, limit=2**20
    )
    assert process.stdout is not None
    lines: collections.deque[str] = collections.deque(maxlen=_NUM_LINES)
    reading = asyncio.create_task(_read(process.stdout, lines))
    try:
        if not await _serves(reading, port):
            raise RuntimeError("\n".join((f"{peer.name} ended before it served; its last lines:", *lines)))
        yield PeerDoor(peer, port, await asyncio.to_thread(_version, port, peer), process.pid)
    finally:
        await _end(process)
        await reading


async def _read(output: asyncio.StreamReader, lines: "collections.deque[str]") -> None:
    """Read all lines to the end, because the process would block on a full pipe."""
    while line := await output.readline():
        lines.append(line.decode(errors="replace").rstrip())


async def _serves(reading: "asyncio.Task[None]", port: int) -> bool:
    """Wait until the server is ready. Return False if its output ends before."""
    healthy = asyncio.create_task(_until_healthy(port))
    try:
        await asyncio.wait((healthy, reading), return_when=asyncio.FIRST_COMPLETED)
        return healthy.done()
    finally:
        healthy.cancel()


async def _until_healthy(port: int) -> None:
    """Wait until the server is ready. There is no timeout, because vLLM compiles for minutes at its first start."""
    while True:
        if await asyncio.to_thread(_get, port, _HEALTH) is not None:
            return
        await asyncio.sleep(_POLL_S)


async def _end(process: Process) -> None:
    """End the server as Ctrl-C does. After a timeout, kill the remaining processes of its session."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), _END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        port: int = found.getsockname()[1]
        return port


def _version(port: int, peer: Peer) -> str:
    path, field = peer.version
    body = _get(port, path)
    if body is None:
        raise RuntimeError(f"{peer.name} does not answer at {path}: see its documentation for the path of its version")
    return str(json.loads(body)[field])


def _get(port: int, path: str) -> bytes | None:
    """Return the body at a path; None if the server does not answer with status 200."""
    connection = HTTPConnection(HOST, port, timeout=_ANSWER_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.read() if answer.status == 200 else None
    except OSError:
        return None
    finally:
        connection.close()
