"""An HTTP gateway in front of an orchestrator, in this process or as `baton http`, and OpenAI's own client for it."""

import asyncio
import re
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
from openai import AsyncOpenAI
from opentelemetry.trace import TracerProvider

from baton.client import AsyncClient
from baton.text.tokenizer import Tokenizer
from gateway.app import Gateway
from gateway.door.rules import DEFAULT_RULES, HttpRules
from gateway.listening import open_socket
from gateway.reading import Reader
from gateway.server import HttpServer
from gateway.upstream import Upstream
from tests.support.clusters.scripted_orchestrator import Fault, ScriptedOrchestrator, serving
from tests.support.folders import ROOT
from tests.support.models.tiny_tokenizer import letter_tokenizer

HOST = "127.0.0.1"
START_S = 120.0


@dataclass(frozen=True)
class Http:
    """The running gateway."""

    server: HttpServer
    openai: AsyncOpenAI

    @property
    def port(self) -> int:
        return self.server.port

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


@asynccontextmanager
async def http_gateway(
    target: str,
    tokenizer: Tokenizer,
    api_key: str = "any",
    spans: TracerProvider | None = None,
    rules: HttpRules = DEFAULT_RULES,
) -> AsyncIterator[Http]:
    """Run a gateway inside the context. Its client does not retry failed requests."""
    async with AsyncClient(target, api_key=api_key) as client:
        model = await client.model()
    async with Upstream(target, rules.default_deadline_s) as upstream:
        reader, listening = Reader(tokenizer, model), open_socket(HOST, 0)
        server = await HttpServer.start(Gateway(upstream, reader, rules=rules), listening, spans=spans)
        url = f"http://{HOST}:{server.port}"
        try:
            async with AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0, timeout=30) as openai:
                yield Http(server, openai)
        finally:
            await server.stop()


@asynccontextmanager
async def scripted_gateway(
    *faults: Fault, rules: HttpRules = DEFAULT_RULES, tokenizer: Tokenizer | None = None
) -> AsyncIterator[tuple[ScriptedOrchestrator, Http, httpx2.AsyncClient]]:
    """Run a gateway in front of a scripted orchestrator. Yield the orchestrator, the gateway and a plain HTTP client.
    Default tokenizer: the letter tokenizer, without a chat template."""
    service = ScriptedOrchestrator(faults)
    async with (
        serving(service) as target,
        http_gateway(target, tokenizer or letter_tokenizer(), rules=rules) as http,
        httpx2.AsyncClient(base_url=http.url) as client,
    ):
        yield service, http, client


@asynccontextmanager
async def http_process(target: str, folder: Path, *more: str) -> AsyncIterator[tuple[Process, str]]:
    """Run `baton http` in a child process. Yield the process and the address that it prints."""
    arguments = ("http", "--target", target, "--port", "0", "--model", str(folder), *more)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "deploy.cli", *arguments, cwd=ROOT, stderr=PIPE
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(START_S):
            while not (found := re.search(rb"serving on (https?://\S+)", line := await process.stderr.readline())):
                assert line, "it ended"
        yield process, found[1].decode()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
