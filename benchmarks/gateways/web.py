"""HTTP processes of the gateway benchmarks: one runs the real HTTP gateway, the other runs clients that read
server-sent events. The generation groups send the time with each token (`Groups.says_time`), so that delays can be
measured."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from baton.process.garbage import collect_rarely
from baton.text.tokenizer import Tokenizer
from benchmarks.gateways.engines import HOST
from benchmarks.gateways.load import PROMPT, Clients
from benchmarks.gateways.process import Answer, usage
from gateway.app import Gateway
from gateway.listening import open_socket
from gateway.reading import Reader
from gateway.server import HttpServer
from gateway.upstream import Upstream

_PREFIX, _DONE = b"data: ", b"[DONE]"


@contextlib.asynccontextmanager
async def http_gateway(target: str, folder: Path) -> AsyncIterator[tuple[int, Answer]]:
    """Main function of the process that runs the HTTP gateway. Yields the gateway's port, which the parent process
    receives first. Then answers every question with the resources that the process has used. `target` is the address of
    the orchestrator, and `folder` the model's folder, which contains the tokenizer."""
    async with Upstream(target) as upstream:
        reader = Reader(Tokenizer.load(folder), await upstream.model({}))
        server = await HttpServer.start(Gateway(upstream, reader), open_socket(HOST, 0))
        collect_rarely()

        async def answer(_question: Any) -> Any:
            return usage()

        try:
            yield server.port, answer
        finally:
            await server.stop()


class HttpLoad(Clients):
    """Clients whose streams run over HTTP."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        super().__init__()
        self._session, self._url = session, url

    async def _one(self, number: int, at_s: float) -> None:
        await asyncio.sleep(at_s)  # the stream's time of arrival
        try:
            await self._follow()
            self.seen.num_done += 1
        except (aiohttp.ClientError, ValueError) as error:
            self.seen.errors.append(str(error) or type(error).__name__)
        self._note()

    async def _follow(self) -> None:
        """Read a stream to its end. Raises ValueError if a token is missing or the stream does not end by its
        length."""
        body = {"prompt": PROMPT.decode(), "max_tokens": self._asked.max_tokens, "stream": True, "ignore_eos": True}
        called_s, num_tokens, finish = time.monotonic(), 0, None
        async with self._session.post(f"{self._url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise ValueError(f"status {answer.status}: {(await answer.text())[:200]}")
            async for line in answer.content:
                if not line.startswith(_PREFIX):
                    continue
                data = line[len(_PREFIX) :].strip()
                if data == _DONE:
                    break
                (choice,) = json.loads(data)["choices"]
                finish = choice["finish_reason"] or finish
                if text := choice["text"]:
                    self._take(text)
                    num_tokens += 1
                    if num_tokens == 1:
                        self.seen.first_s.append(time.monotonic() - called_s)
                        self._note()
        if num_tokens != self._asked.max_tokens or finish != "length":
            raise ValueError(f"ended by {finish} after {num_tokens} of {self._asked.max_tokens} tokens")

    def _take(self, text: str) -> None:
        self.seen.num_tokens += 1
        self.seen.late_ms.append((time.time_ns() - int(text)) / 1e6)


@contextlib.asynccontextmanager
async def http_load(url: str) -> AsyncIterator[tuple[None, Answer]]:
    """Main function of a process that runs HTTP clients. `Clients.answer` lists the questions that the process
    answers."""
    connections = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connections, timeout=aiohttp.ClientTimeout(total=None)) as session:
        yield None, HttpLoad(session, url).answer
