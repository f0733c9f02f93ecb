"""The clients of the HTTP benchmark, before a real HTTP gateway: what is whole is done, what is not is an error."""

import aiohttp
import pytest

from benchmarks.gateways.load import Seen, Streams
from benchmarks.gateways.web import HttpLoad
from tests.support.clusters.scripted_orchestrator import ScriptedOrchestrator, serving
from tests.support.models.tiny_tokenizer import letter_tokenizer
from tests.support.wire.http_gateway import http_gateway

pytestmark = pytest.mark.integration


async def seen_of(num_words: int, asked: Streams) -> Seen:
    """What the clients see of a server whose answers are so many words, each a time."""
    words = [(number, f" {number}") for number in range(num_words)]
    async with (
        serving(ScriptedOrchestrator(words=words)) as target,
        http_gateway(target, letter_tokenizer()) as http,
        aiohttp.ClientSession() as session,
    ):
        clients = HttpLoad(session, http.url)
        await clients.open(asked)
        return await clients.drain()


async def test_streams_that_are_whole_are_done() -> None:
    seen = await seen_of(9, Streams(20, max_tokens=7, within_s=0.1))
    assert (seen.num_done, seen.num_tokens, seen.errors) == (20, 140, [])
    assert len(seen.first_s) == 20 and len(seen.late_ms) == 140


async def test_a_stream_that_ends_too_soon_is_an_error() -> None:
    seen = await seen_of(3, Streams(2, max_tokens=7, within_s=0.0))
    assert (seen.num_done, seen.errors) == (0, ["ended by stop after 3 of 7 tokens"] * 2)


async def test_a_refusal_is_an_error() -> None:
    seen = await seen_of(3, Streams(1, max_tokens=-1, within_s=0.0))
    assert seen.num_done == 0 and seen.errors[0].startswith("status 400")
