"""Servers under load: the same tokens over HTTP and gRPC, instants as they come, and every failure with its kind."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from baton.errors import BatonError, ConfigError, PermissionDeniedError, ResourceExhaustedError, UnavailableError
from baton.text.tokenizer import Tokenizer
from baton_lab.bench import grpc_server
from baton_lab.bench.grpc_server import GrpcServer
from baton_lab.bench.openai_server import OpenAiServer
from baton_lab.bench.passages import NOVEL, Passages, read_words
from baton_lab.bench.probing import probe
from baton_lab.bench.records import MessageLog, RequestFailedError, TokenCounts
from baton_lab.bench.server import Server, Style
from tests.support.clusters.clients import HOST
from tests.support.clusters.cluster import cluster
from tests.support.clusters.deadlines import Deadlines
from tests.support.clusters.scripted_orchestrator import MODEL, Fault, ScriptedOrchestrator, serving, text_of
from tests.support.eventually import eventually
from tests.support.models.tiny_tokenizer import chat_letters, letter_tokenizer
from tests.support.wire.http_gateway import http_gateway

pytestmark = pytest.mark.integration

HI = [("user", "Hi")]


@asynccontextmanager
async def scripted(
    way: str, *faults: Fault, style: Style | None = None, tokenizer: Tokenizer | None = None
) -> AsyncIterator[tuple[ScriptedOrchestrator, Server]]:
    """A scripted orchestrator, asked over gRPC or by way of a real HTTP gateway."""
    service, made = ScriptedOrchestrator(faults), style or Style()
    async with serving(service) as target:
        if way == "grpc":
            async with GrpcServer.connected(target, "key", made) as over_grpc:
                yield service, over_grpc
        else:
            async with (
                http_gateway(target, tokenizer or letter_tokenizer()) as http,
                OpenAiServer.connected(http.url, None, "key", made) as over_http,
            ):
                yield service, over_http


def log() -> MessageLog:
    return MessageLog(asyncio.get_running_loop().time)


both = pytest.mark.parametrize("way", ["grpc", "http"])


@both
async def test_an_answer_is_heard_message_by_message(way: str) -> None:
    async with scripted(way) as (service, server):
        heard = log()
        counts = await server.ask(HI, 5, heard)
        assert heard.text == text_of(5)
        assert len(heard.message_s) in (5, 6)  # over HTTP, text that the end brings is a message
        assert heard.message_s == sorted(heard.message_s)
        assert counts is not None and (counts.num_prompt, counts.num_output) == (5, 5)
        assert server.about.model == MODEL.name and server.about.context_tokens == MODEL.max_tokens
        (request,) = service.requests
        sampling = request.sampling
        assert (sampling.max_tokens, sampling.ignore_eos, sampling.temperature) == (5, True, 0.0)
        assert service.metadata[-1]["authorization"] == "Bearer key"


@both
async def test_a_conversation_is_sent_as_a_chat_if_it_is_one(way: str, tmp_path: Path) -> None:
    chat = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Yes?"), ("user", "Why?")]
    tokenizer = chat_letters(tmp_path)
    async with scripted(way, style=Style(is_chat=True), tokenizer=tokenizer) as (service, server):
        await server.ask(chat, 2, log())
        (request,) = service.requests
        if way == "grpc":
            assert [(each.role, each.content) for each in request.chat.messages] == chat
        else:
            said = [{"role": role, "content": content} for role, content in chat]
            assert list(request.token_ids.ids) == list(tokenizer.encode_chat(said))


@both
async def test_failures_have_kinds(way: str) -> None:
    faults = (
        Fault(error=ResourceExhaustedError("the queue is full"), before_started=True),
        Fault(error=PermissionDeniedError("not you"), before_started=True),
        Fault(after=2, error=BatonError("a bug")),
    )
    kinds = {"grpc": ["ResourceExhausted", "PermissionDenied", "Baton"], "http": ["http_429", "http_403"]}
    async with scripted(way, *faults) as (_, server):
        found = []
        for text in ("queue is full", "not you", "a bug"):
            with pytest.raises(RequestFailedError, match=text) as failed:
                await server.ask(HI, 5, log())
            found.append(failed.value.kind)
        assert found == (kinds["grpc"] if way == "grpc" else [*kinds["http"], "stream_error"])


@both
async def test_a_request_that_takes_too_long_fails_and_is_cancelled(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines = Deadlines(monkeypatch, grpc_server)
    async with scripted(way, Fault(after=1, hang=True), style=Style(timeout_s=10.0)) as (service, server):
        heard = log()
        asking = asyncio.create_task(server.ask(HI, 5, heard))
        await eventually(lambda: asyncio.sleep(0, len(heard.message_s)), lambda number: number == 1)
        if way == "grpc":  # the HTTP client keeps time by itself
            deadlines.let_pass()
        with pytest.raises(RequestFailedError, match=r"no end within 10 s") as failed:
            await asking
        assert failed.value.kind == "timeout" and len(heard.message_s) == 1
        assert await asyncio.wait_for(service.cancelled.wait(), 60)


def test_no_server_is_said_before_any_load() -> None:
    async def connect(server: AbstractAsyncContextManager[Server]) -> None:
        async with server:
            pass

    with pytest.raises(UnavailableError, match="no server answers at http://127.0.0.1:9/v1.*--url"):
        asyncio.run(connect(OpenAiServer.connected("http://127.0.0.1:9", None, None, Style())))
    with pytest.raises(UnavailableError, match="no server answers at 127.0.0.1:9.*--address"):
        asyncio.run(connect(GrpcServer.connected("127.0.0.1:9", None, Style())))


async def test_another_model_is_refused_with_those_that_there_are() -> None:
    async with serving(ScriptedOrchestrator()) as target, http_gateway(target, letter_tokenizer()) as http:
        with pytest.raises(ConfigError, match="--model: 'gpt-5' is none of scripted"):
            async with OpenAiServer.connected(f"{http.url}/v1/", "gpt-5", None, Style()):
                pass


@asynccontextmanager
async def saying(answer: bytes, *, closes: bool = True) -> AsyncIterator[Server]:
    """A server of plain bytes, whose models are listed and whose every other answer is these."""
    models = b'{"data": [{"id": "m"}]}'
    listed = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(models), models)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if head.startswith(b"GET /v1/models "):
                    writer.write(listed)
                    continue
                length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length:"))
                await reader.readexactly(length)
                writer.write(answer)
                await writer.drain()
                if closes:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the client has gone
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, HOST, 0)
    port = listening.sockets[0].getsockname()[1]
    async with listening, OpenAiServer.connected(f"http://{HOST}:{port}", None, None, Style()) as server:
        yield server


def events(*events: bytes) -> bytes:
    data = b"".join(b"data: %s\r\n\r\n" % event for event in events)
    return b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n" + data


CHUNK = b'{"choices": [{"index": 0, "text": "Yes", "finish_reason": null}]}'


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        (events(CHUNK), "truncated", "ended before the answer did"),
        (events(b"[DONE]"), "empty", "no text"),
        (events(b"{"), "bad_answer", "not valid JSON"),
        (events(b"[1]"), "bad_answer", "not an object"),
        (events(CHUNK, b'{"error": {"message": "out\\nof luck"}}'), "stream_error", "out of luck"),
        (events(CHUNK, b'{"error": "gone"}'), "stream_error", "gone"),
        (b"HTTP/1.1 500 No\r\ncontent-length: 4\r\n\r\noops", "http_500", "oops"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 400\r\n\r\ndata: ", "disconnect", "closed the connection"),
        (b"", "disconnect", "closed the connection"),
        (b"nonsense\r\n\r\n", "ClientResponseError", "400"),
    ],
)
async def test_answers_that_are_not_whole_have_kinds(answer: bytes, kind: str, text: str) -> None:
    async with saying(answer) as server:
        with pytest.raises(RequestFailedError, match=text) as failed:
            await server.ask(HI, 5, log())
        assert failed.value.kind == kind


async def test_events_of_other_servers_are_read() -> None:
    finished = b'{"choices": [{"index": 0, "text": "!", "finish_reason": "length"}], "usage": null}'
    used = b'{"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}}'
    answer = events(CHUNK, finished, used, b"[DONE]").replace(b"\r\n\r\ndata", b"\r\n\r\n: a comment\n\ndata", 2)
    async with saying(answer) as server:
        heard = log()
        assert await server.ask(HI, 5, heard) == TokenCounts(7, 2, None)
        assert heard.text == "Yes!" and server.about.context_tokens is None


async def test_thoughts_of_a_model_are_heard_and_roles_are_not() -> None:
    deltas = [b'{"role": "assistant", "content": ""}', b'{"reasoning_content": "Hm."}', b'{"content": "Yes"}', b"{}"]
    chunks = [b'{"choices": [{"index": 0, "delta": %s, "finish_reason": null}]}' % delta for delta in deltas]
    async with saying(events(*chunks, b"[DONE]")) as server:
        heard = log()
        assert await server.ask(HI, 5, heard) is None
        assert heard.text == "Hm.Yes" and len(heard.message_s) == 2


@both
async def test_real_engines_say_how_they_count_tokens(way: str, tmp_path: Path) -> None:
    """Of the letters' tokenizer each character is a token: a word has as many as it is long, and a space."""
    async with cluster() as made:
        target = f"{HOST}:{made.server.port}"
        passages = Passages(read_words(NOVEL), 1)
        async with http_gateway(target, chat_letters(tmp_path)) as http:
            connected: AbstractAsyncContextManager[Server] = (
                GrpcServer.connected(target, None, Style())
                if way == "grpc"
                else OpenAiServer.connected(http.url, None, None, Style())
            )
            async with connected as server:
                await probe(server, passages, asyncio.get_running_loop().time)
                assert 4.0 < passages.tokens_per_word < 8.0
                heard = log()
                counts = await server.ask([("user", passages.take(100))], 8, heard)
                assert counts is not None and counts.num_output == 8 and counts.num_prompt == pytest.approx(100, abs=50)
                assert 1 <= len(heard.message_s) <= 8
