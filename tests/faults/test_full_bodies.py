"""Bodies whose lists and maps are filled with copies of one element, and grammars that ended processes, sent through
`baton http` to a cluster of processes. Valid streams that run at the same time lose no tokens."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
from openai import AsyncOpenAI

from baton import AsyncClient
from baton.calls.resume import Reconnect
from deploy.config.file import WrittenConfig
from tests.support.clusters.kept import KeptCluster, kept
from tests.support.models.letter_models import write_letter_model
from tests.support.models.tiny_tokenizer import write_chat_template
from tests.support.wire.hostile.bodies import REFUSALS, fields_of, first_of_each_route, status_of
from tests.support.wire.hostile.named_forms import named_forms
from tests.support.wire.http_gateway import http_process

pytestmark = pytest.mark.integration

NUM_STREAMS = 10
MAX_TOKENS = 200
DEAD_AFTER_S = 30.0
"""A crowded machine may hold up a sound worker for many seconds."""
NEVER = Reconnect(num_connects=1, num_resumes=0)


@dataclass(frozen=True)
class Served:
    """A cluster and the HTTP gateway in front of it, with a client of each."""

    url: str
    direct: AsyncClient
    openai: AsyncOpenAI

    async def by_grpc(self, prompt: str, request_id: str) -> str:
        """Return the output of a stream of tokens."""
        stream = self.direct.generate(
            prompt, max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True, request_id=request_id
        )
        return (await stream.collect()).text

    async def by_http(self, prompt: str, request_id: str) -> str:
        """Return the output of a stream of events."""
        stream = await self.openai.completions.create(
            model="",
            prompt=prompt,
            max_tokens=MAX_TOKENS,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
            extra_headers={"x-request-id": request_id},
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def once(self, ask: Callable[[str, str], Awaitable[str]], prompt: str) -> str:
        """Return the output of a stream, which must have ended in its first attempt."""
        request_id = uuid.uuid4().hex
        text = await ask(prompt, request_id)
        found = [each for each in (await self.direct.requests()).requests if each.request_id == request_id]
        assert [(each.num_failures, each.usage.num_attempts) for each in found] == [(0, 1)]
        assert found[0].usage.num_output_tokens == MAX_TOKENS
        return text


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """One engine that prefills by itself, as `baton serve` arranges two cores."""
    write_chat_template(write_letter_model(tmp_path))
    config = WrittenConfig(
        {
            "model": {"dtype": "float32"},
            "prefill": {"num_groups": 0},
            "generate": {"num_threads": 1, "num_slots": 2 * NUM_STREAMS},
            "orchestrator": {"port": 0},
            "supervision": {"dead_after_s": DEAD_AFTER_S},
        }
    ).config
    async with AsyncExitStack() as stack:
        made = KeptCluster(config=config, folder=tmp_path)
        await stack.enter_async_context(kept(made))
        process, url = await stack.enter_async_context(http_process(made.target, tmp_path))
        direct = await stack.enter_async_context(AsyncClient(made.target, reconnect=NEVER))
        openai = await stack.enter_async_context(AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0))
        assert made.keeper is not None
        pid = made.keeper.pid
        yield Served(url, direct, openai)
        assert process.returncode is None
        assert made.keeper.pid == pid, "the orchestrator was replaced"


@pytest.mark.parametrize(
    "is_whole",
    [
        pytest.param(False, marks=pytest.mark.ci, id="a field of each route"),
        pytest.param(True, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)], id="all fields"),
    ],
)
async def test_ten_honest_streams_lose_nothing(served: Served, is_whole: bool) -> None:
    asked = [
        (served.by_http if number % 2 else served.by_grpc, f"Honest stream {number}") for number in range(NUM_STREAMS)
    ]
    expected = await asyncio.gather(*(served.once(ask, prompt) for ask, prompt in asked))
    assert len({*expected}) == NUM_STREAMS
    is_over = asyncio.Event()

    async def again(ask: Callable[[str, str], Awaitable[str]], prompt: str, text: str) -> None:
        while not is_over.is_set():
            assert await served.once(ask, prompt) == text

    async with asyncio.TaskGroup() as streams:
        for (ask, prompt), text in zip(asked, expected, strict=True):
            streams.create_task(again(ask, prompt, text))
        await attack(served.url, is_whole)
        is_over.set()


async def attack(url: str, is_whole: bool) -> None:
    """Send one body after another; each is answered, and refused unless it is in order."""
    async with httpx2.AsyncClient(base_url=url) as client:
        fields = fields_of((await client.get("/openapi.json")).json())
    port = int(url.rpartition(":")[2])
    for field in fields if is_whole else first_of_each_route(fields):
        for body in field.bodies():
            status = await asyncio.to_thread(status_of, port, field.path, body)
            assert status in {200, *REFUSALS}, field.told(body)
    for name, form in named_forms().items():
        if form.grammar is not None:
            body = json.dumps({"prompt": "a", "max_tokens": 4, "guided_grammar": form.grammar}).encode()
            status = await asyncio.to_thread(status_of, port, "/v1/completions", body)
            assert status in {200, *REFUSALS}, name
