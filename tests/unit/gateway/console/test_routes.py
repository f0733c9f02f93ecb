"""The console's routes: files and their headers, the state by the caller's key, and streams of tokens."""

import asyncio
import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx2
import pytest

from baton.errors import ResourceExhaustedError, UnauthenticatedError
from baton.proto_types import model_from_proto
from gateway.app import Gateway
from gateway.listening import open_socket
from gateway.reading import Reader
from gateway.server import HttpServer
from gateway.upstream import Upstream
from tests.support.clusters.scripted_orchestrator import MODEL, Fault, ScriptedOrchestrator, serving, text_of
from tests.support.folders import ROOT
from tests.support.models.tiny_tokenizer import letter_tokenizer
from tests.support.wire.http_gateway import scripted_gateway

pytestmark = pytest.mark.integration

STATIC = Path(str(files("gateway.console") / "static"))
PAGES = {path.name: path.read_text() for path in STATIC.iterdir()}
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
ASKED: dict[str, Any] = {"prompt": "Hi", "max_tokens": 3}


def events_of(text: str) -> list[tuple[str, Any]]:
    """The events of a stream, by name."""
    lines = [each.split("\n") for each in text.split("\n\n") if each]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in lines]


async def test_a_browser_is_led_to_the_page_and_a_program_is_not() -> None:
    async with scripted_gateway() as (_, _http, client):
        answer = await client.get("/", headers=BROWSER, follow_redirects=True)
        assert answer.url.path == "/console/" and "<title>Baton console</title>" in answer.text
        assert [each.url.path for each in answer.history] == ["/"]
        plain = await client.get("/")
        assert plain.status_code == 404 and plain.json()["error"]["type"] == "not_found_error"
        assert (await client.get("/console")).headers["location"] == "console/"


async def test_each_file_is_served_with_its_type_and_lets_nothing_foreign_in() -> None:
    types = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
    async with scripted_gateway() as (_, _http, client):
        for name, text in PAGES.items():
            answer = await client.get(f"/console/static/{name}")
            assert answer.status_code == 200 and answer.text == text
            assert answer.headers["content-type"].startswith(types[f".{name.partition('.')[2]}"])
            assert answer.headers["content-security-policy"].startswith("default-src 'self';")
            assert answer.headers["x-content-type-options"] == "nosniff"
            again = await client.get(f"/console/static/{name}", headers={"if-none-match": answer.headers["etag"]})
            assert again.status_code == 304 and not again.content


@pytest.mark.parametrize("name", ["absent.js", "..%2froutes.py", "%2e%2e/routes.py", "../feed.py"])
async def test_no_other_file_can_be_had(name: str) -> None:
    async with scripted_gateway() as (_, _http, client):
        assert (await client.get(f"/console/static/{name}")).status_code == 404


@dataclass
class Links(HTMLParser):
    """What a page loads or runs."""

    found: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert not any(name == "style" or name.startswith("on") for name in given), f"{tag}: inline, so refused"
        self.found += [value for name, value in attrs if name in ("src", "href") and value and value[0] != "#"]


def test_the_page_and_its_scripts_name_only_files_that_are_there() -> None:
    links = Links()
    links.feed(PAGES["index.html"])
    names = {each.removeprefix("static/") for each in links.found}
    for text in PAGES.values():
        names |= set(re.findall(r'from "\./([a-z]+\.js)"', text))
    assert names == PAGES.keys() - {"index.html"}
    for name, text in PAGES.items():
        foreign = text.replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", foreign), name


def test_the_wheel_has_the_files() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    data = project["tool"]["setuptools"]["package-data"]
    found = {each.name for pattern in data["gateway.console"] for each in STATIC.parent.glob(pattern)}
    assert found == PAGES.keys()


def test_the_files_stay_small() -> None:
    assert all(len(text.splitlines()) < 330 for text in PAGES.values())


async def test_the_state_is_asked_for_with_the_caller_s_key_and_shared_for_a_second() -> None:
    async with scripted_gateway() as (service, _http, client):
        key = {"authorization": "Bearer ana"}
        answers = await asyncio.gather(*(client.get("/console/api/state", headers=key) for _ in range(5)))
        found = answers[0].json()
        assert [group["name"] for group in found["groups"]] == ["g0", "p0"] and found["num_queued"] == 2
        assert [each["number"] for each in found["requests"]] == [2, 1]
        assert len({answer.content for answer in answers}) == 1
        assert answers[0].headers["cache-control"] == "no-store"
        assert [each.get("authorization") for each in service.looks] == ["Bearer ana"] * 2  # the state, the requests
        assert (await client.get("/console/api/state")).status_code == 200
        assert len(service.looks) == 4, "another caller's answer is another's"


async def test_what_the_server_refuses_is_said_in_its_words() -> None:
    async with scripted_gateway(Fault(error=ResourceExhaustedError("the queue is full", 2.2), before_started=True)) as (
        service,
        _http,
        client,
    ):
        refused = await client.post("/console/api/completion", json=ASKED)
        assert refused.status_code == 429 and refused.json()["error"]["message"] == "the queue is full"
        service.refuses = UnauthenticatedError("no such key")
        state = await client.get("/console/api/state")
        assert state.status_code == 401 and state.json()["error"]["message"] == "no such key"


async def test_a_stream_brings_its_tokens_and_what_the_request_took() -> None:
    async with scripted_gateway() as (service, _http, client):
        answer = await client.post("/console/api/completion", json=ASKED | {"seed": str(2**64 - 1)})
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = events_of(answer.text)
        assert [name for name, _ in events] == ["begin", "token", "token", "token", "token", "end"]
        assert events[0][1]["model"] == MODEL.name and events[0][1]["seed"] == str(2**64 - 1)
        tokens = [data for name, data in events if name == "token"]
        assert "".join(each["text"] for each in tokens) == text_of(3)
        assert [each["id"] for each in tokens] == [1000, 1001, 1002, None] and tokens[-1]["finish"] == "length"
        assert events[-1][1]["usage"]["num_output_tokens"] == 3
        assert service.requests[0].sampling.seed == 2**64 - 1


async def test_an_error_after_the_first_token_is_the_stream_s_last_event() -> None:
    async with scripted_gateway(Fault(after=1, error=UnauthenticatedError("your key has ended"))) as (_, _http, client):
        events = events_of((await client.post("/console/api/completion", json=ASKED)).text)
        assert [name for name, _ in events] == ["begin", "token", "error"]
        assert events[-1][1]["error"]["message"] == "your key has ended"


async def test_several_choices_are_not_the_playground_s() -> None:
    async with scripted_gateway() as (service, _http, client):
        for more in ({"n": 2}, {"prompt": ["a", "b"]}):
            refused = await client.post("/console/api/completion", json=ASKED | more)
            assert refused.status_code == 400 and "one choice of one prompt" in refused.json()["error"]["message"]
        assert not service.requests


async def test_a_gateway_without_a_console_has_none_of_its_routes() -> None:
    async with serving(ScriptedOrchestrator()) as target, Upstream(target) as upstream:
        reader = Reader(letter_tokenizer(), model_from_proto(MODEL))
        server = await HttpServer.start(Gateway(upstream, reader, has_console=False), open_socket("127.0.0.1", 0))
        try:
            async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
                for path in ("/", "/console", "/console/", "/console/static/main.js", "/console/api/state"):
                    assert (await client.get(path, headers=BROWSER)).status_code == 404
                assert (await client.get("/v1/models")).status_code == 200
        finally:
            await server.stop()


async def test_the_api_s_document_says_nothing_of_the_console() -> None:
    async with scripted_gateway() as (_, _http, client):
        paths = (await client.get("/openapi.json")).json()["paths"]
        assert "/v1/models" in paths and not [path for path in paths if "console" in path]
