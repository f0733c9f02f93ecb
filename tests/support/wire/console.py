"""The web console in a browser, with a real gateway, orchestrator and engines."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from playwright.async_api import Browser, Page, Request, expect

from baton.text.tokenizer import Tokenizer
from baton.v1 import orchestrator_pb2 as pb
from tests.support.clusters.clients import HOST
from tests.support.clusters.cluster import BareCluster, cluster
from tests.support.models.tiny_tokenizer import letter_tokenizer
from tests.support.wire.browser import browser
from tests.support.wire.http_gateway import Http, http_gateway

SCREENS = ("cluster", "requests", "memory", "playground")
WAIT_MS = 20_000
expect.set_options(timeout=WAIT_MS)


@dataclass
class Console:
    """A page of the console, and the servers that it uses."""

    page: Page
    made: BareCluster
    http: Http
    chrome: Browser
    asked: list[str] = field(default_factory=list)
    """URLs of all requests that the page has sent."""
    defects: list[str] = field(default_factory=list)
    """Uncaught errors of the page's scripts."""

    async def open(self, screen: str) -> None:
        """Open a screen by its link in the page."""
        await self.page.locator(f'nav a[href="#{screen}"]').click()
        await expect(self.page.locator(f"#screen-{screen}")).to_be_visible()

    async def ask(self, text: str, **fields: str) -> None:
        """Fill in the playground's form, and send it."""
        await self.page.fill("#prompt", text)
        for name, value in fields.items():
            await self.page.fill(f"[name={name}]", value)
        await self.page.check("[name=ignore_eos]")
        await self.page.click("#send")


@asynccontextmanager
async def console(
    program: str,
    *,
    tokenizer: Tokenizer | None = None,
    shows: Mapping[str, Any] | None = None,
    key: str = "any",
    **plan: Any,
) -> AsyncIterator[Console]:
    """Open the console at the gateway's root. `shows` sets options of the browser context. With a tokenizer that has a
    chat template, the model is a chat model."""
    async with (
        cluster(**plan) as made,
        http_gateway(f"{HOST}:{made.server.port}", tokenizer or letter_tokenizer(), key) as http,
        browser(program) as chrome,
    ):
        context = await chrome.new_context(**(shows or {}))
        found = Console(await context.new_page(), made, http, chrome)
        found.page.on("request", lambda request: found.asked.append(_url(request)))
        found.page.on("pageerror", lambda error: found.defects.append(str(error)))
        await found.page.goto(f"{http.url}/")
        yield found
        await context.close()
        assert found.defects == []
        assert not [url for url in found.asked if not url.startswith(f"{http.url}/")], "nothing asks anybody else"


async def requests(made: BareCluster) -> Sequence[pb.RequestStatus]:
    """Return the status of all requests that the orchestrator reports, latest first."""
    return (await made.stub.GetRequests(pb.GetRequestsRequest(num_ended=9), timeout=60)).requests


def _url(request: Request) -> str:
    return request.url
