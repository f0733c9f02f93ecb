"""An HTTP gateway in front of a server, and OpenAI's own client of it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx2
from openai import AsyncOpenAI
from opentelemetry.trace import TracerProvider

from baton.client import AsyncClient
from gateway.door.rules import DEFAULT_RULES, HttpRules
from gateway.listening import open_socket
from gateway.reading import Reader
from gateway.server import HttpServer
from gateway.upstream import Upstream
from tests.support.clusters.scripted_orchestrator import Fault, ScriptedOrchestrator, serving
from tests.support.models.tiny_tokenizer import letter_tokenizer
from text.tokenizer import Tokenizer

HOST = "127.0.0.1"


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
    """Serves until left; the client makes no attempt of its own after a failure."""
    async with AsyncClient(target, api_key=api_key) as client:
        model = await client.model()
    async with Upstream(target, rules.default_deadline_s) as upstream:
        reader, listening = Reader(tokenizer, model), open_socket(HOST, 0)
        server = await HttpServer.start(upstream, reader, listening, rules=rules, spans=spans)
        url = f"http://{HOST}:{server.port}"
        try:
            async with AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0, timeout=30) as openai:
                yield Http(server, openai)
        finally:
            await server.stop()


@asynccontextmanager
async def scripted_gateway(
    *faults: Fault, rules: HttpRules = DEFAULT_RULES
) -> AsyncIterator[tuple[ScriptedOrchestrator, Http, httpx2.AsyncClient]]:
    """Serve a scripted orchestrator, and the letters' tokenizer, through a gateway; with a plain HTTP client of it."""
    service = ScriptedOrchestrator(faults)
    async with (
        serving(service) as target,
        http_gateway(target, letter_tokenizer(), rules=rules) as http,
        httpx2.AsyncClient(base_url=http.url) as client,
    ):
        yield service, http, client
