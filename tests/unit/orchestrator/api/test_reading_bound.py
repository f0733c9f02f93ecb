"""How much is read off the loop at a time: what more than that comes to, and when it counts no more."""

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import openai
import pytest

from baton import AsyncClient
from baton.errors import InvalidArgumentError, ResourceExhaustedError
from baton.limits import MAX_PROMPT_BYTES, MAX_READING_BYTES
from baton.process.clock import SystemClock
from baton.results.completion import ModelInfo
from baton.text import bounded_reading
from baton.text.bounded_reading import BoundedReading, reading_bytes
from baton.text.form_prover import FormProver
from baton.text.tokenizer import Tokenizer
from baton.transport.channel import make_channel
from baton.v1 import orchestrator_pb2 as pb
from gateway import app
from orchestrator.api import frontend, gateway
from orchestrator.api.checks import RequestValidator
from orchestrator.api.frontend import OrchestratorServicer
from orchestrator.api.gateway import GrpcGateway, ask_model
from orchestrator.api.request_reader import RequestReader
from orchestrator.composition import build_orchestrator
from orchestrator.membership.members import Membership
from tests.support.clusters.planners import linear_planner
from tests.support.clusters.scripted_orchestrator import ScriptedOrchestrator, serving
from tests.support.eventually import eventually
from tests.support.manual_clock import ManualClock
from tests.support.models.tiny_tokenizer import letter_tokenizer, write_letters
from tests.support.wire.http_gateway import http_gateway
from tests.support.wire.secret import SECRET

pytestmark = pytest.mark.integration

HOST = "127.0.0.1"
WAIT_S = 60.0
LONG = "x" * 400
MODEL = ModelInfo("m", 512, 97, "float32", False, "f")


class Gate:
    """Something to read, which takes until it is let."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.let = threading.Event()
        self.num_reads = 0

    def read(self) -> int:
        self.num_reads += 1
        self.begun.set()
        assert self.let.wait(WAIT_S)
        return self.num_reads


@pytest.fixture
def gate() -> Gate:
    return Gate()


def asked(num_bytes: int) -> pb.GenerateRequest:
    """A request of that size."""
    request = pb.GenerateRequest(prompt=b"x" * (num_bytes - 3))
    assert request.ByteSize() == num_bytes
    return request


def reader_of(max_bytes: int) -> RequestReader:
    return RequestReader(RequestValidator(letter_tokenizer(), MODEL, ()), max_bytes)


@asynccontextmanager
async def being_read(reader: RequestReader, num_bytes: int, gate: Gate) -> AsyncIterator[asyncio.Task[int]]:
    """A request in a thread; let go at the end."""
    task = asyncio.create_task(reader.off_the_loop(asked(num_bytes), gate.read))
    try:
        assert await asyncio.to_thread(gate.begun.wait, WAIT_S)
        yield task
    finally:
        gate.let.set()
        await asyncio.wait((task,))


async def test_what_exceeds_the_bound_is_refused_at_once(gate: Gate) -> None:
    reader = reader_of(1000)
    async with being_read(reader, 300, gate) as first, being_read(reader, 300, gate):
        with pytest.raises(ResourceExhaustedError, match=r"600 bytes .* 401 more exceed the limit of 1000") as caught:
            await reader.off_the_loop(asked(401), lambda: 0)
        assert caught.value.retry_after_s == 0.1
        assert await reader.off_the_loop(asked(400), lambda: 7) == 7
        gate.let.set()
        assert await first == 2


async def test_what_is_read_on_the_loop_is_not_refused(gate: Gate) -> None:
    reader = reader_of(300)
    async with being_read(reader, 300, gate):
        assert await reader.off_the_loop(asked(200), lambda: 7) == 7


async def test_a_short_request_is_read_on_the_loop() -> None:
    reader = reader_of(1000)
    assert await reader.off_the_loop(asked(200), threading.get_ident) == threading.get_ident()
    assert await reader.off_the_loop(asked(300), threading.get_ident) != threading.get_ident()


async def test_a_longer_request_is_read_by_itself(gate: Gate) -> None:
    reader = reader_of(300)
    async with being_read(reader, 5000, gate) as alone:
        with pytest.raises(ResourceExhaustedError):
            await reader.off_the_loop(asked(257), lambda: 0)
        gate.let.set()
        assert await alone == 1
    assert await reader.off_the_loop(asked(300), lambda: 7) == 7


async def test_a_failed_read_is_raised_and_counts_no_more() -> None:
    def refuse() -> int:
        raise InvalidArgumentError("no")

    reader = reader_of(300)
    for _ in range(2):
        with pytest.raises(InvalidArgumentError):
            await reader.off_the_loop(asked(300), refuse)


async def test_a_cancelled_request_counts_while_a_thread_reads_it(gate: Gate) -> None:
    reader = reader_of(300)

    async def is_refused() -> bool:
        try:
            await reader.off_the_loop(asked(257), lambda: 0)
        except ResourceExhaustedError:
            return True
        return False

    async with being_read(reader, 300, gate) as first:
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await is_refused()
    await eventually(is_refused, lambda refused: not refused, WAIT_S)


async def test_a_cancelled_request_that_waits_for_a_thread_counts_and_is_not_read(gate: Gate) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    reader, unread = reader_of(900), Gate()
    gate.let.set()
    unread.let.set()
    held = threading.Event()
    occupied = asyncio.get_running_loop().run_in_executor(None, held.wait, WAIT_S)
    waiting = asyncio.create_task(reader.off_the_loop(asked(600), unread.read))
    await asyncio.sleep(0)  # it has begun
    waiting.cancel()
    await asyncio.wait((waiting,))
    with pytest.raises(ResourceExhaustedError):
        await reader.off_the_loop(asked(301), gate.read)
    last = asyncio.create_task(reader.off_the_loop(asked(300), gate.read))
    held.set()
    assert await occupied and await last == 1
    assert waiting.cancelled() and unread.num_reads == 0
    assert await reader.off_the_loop(asked(900), gate.read) == 2


class HeldTokenizer(Tokenizer):
    """Encodes when it is let."""

    gate: Gate

    def encode(self, text: str) -> list[int]:
        self.gate.read()
        return super().encode(text)


@pytest.fixture
def held(tmp_path: Path, gate: Gate) -> HeldTokenizer:
    tokenizer = HeldTokenizer.load(write_letters(tmp_path))
    tokenizer.gate = gate
    return tokenizer


async def test_a_gateway_refuses_what_exceeds_the_bound(
    held: HeldTokenizer, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "RequestReader", partial(RequestReader, max_bytes=300))
    service = ScriptedOrchestrator()
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(serving(service))
        channel = await stack.enter_async_context(make_channel(target))
        model = await ask_model(channel, WAIT_S)
        made = await GrpcGateway.start(channel, held, model, clock=SystemClock(), host=HOST)
        stack.push_async_callback(made.stop)
        stack.callback(gate.let.set)
        client = await stack.enter_async_context(AsyncClient(f"{HOST}:{made.port}"))
        first = asyncio.create_task(client.generate(LONG, max_tokens=1).collect())
        assert await asyncio.to_thread(gate.begun.wait, WAIT_S)
        with pytest.raises(ResourceExhaustedError, match="exceed the limit of 300") as caught:
            await client.generate(LONG, max_tokens=1).collect()
        assert caught.value.retry_after_s == 0.1
        gate.let.set()
        assert len((await first).tokens) == 1
    assert len(service.requests) == 1


async def test_an_http_gateway_refuses_what_exceeds_the_bound(
    held: HeldTokenizer, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "BoundedReading", partial(BoundedReading, 2000))
    async with serving(ScriptedOrchestrator()) as target, http_gateway(target, held) as http:

        async def ask() -> str:
            return (await http.openai.completions.create(model="scripted", prompt=LONG * 3, max_tokens=1)).id

        first = asyncio.create_task(ask())
        try:
            assert await asyncio.to_thread(gate.begun.wait, WAIT_S)
            with pytest.raises(openai.RateLimitError, match="exceed the limit of 2000") as caught:
                await ask()
            assert caught.value.response.headers["retry-after"] == "1"
        finally:
            gate.let.set()
        assert await first and await ask()


async def test_an_orchestrator_refuses_what_exceeds_the_bound(
    held: HeldTokenizer, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontend, "RequestReader", partial(RequestReader, max_bytes=300))
    orchestrator = build_orchestrator(Membership(), linear_planner(), ManualClock(), secret=SECRET)
    servicer = OrchestratorServicer(orchestrator, RequestValidator(held, MODEL, ()), cast(FormProver, None))
    context = cast(Any, SimpleNamespace(invocation_metadata=tuple, time_remaining=lambda: None))
    request = pb.GenerateRequest(prompt=LONG.encode() * 2)  # longer than the model takes

    async def ask() -> None:
        await servicer.Generate(request, context)

    first = asyncio.create_task(ask())
    try:
        assert await asyncio.to_thread(gate.begun.wait, WAIT_S)
        with pytest.raises(ResourceExhaustedError, match="exceed the limit of 300"):
            await ask()
    finally:
        gate.let.set()
        await asyncio.wait((first,))
    with pytest.raises(InvalidArgumentError, match="prompt has 800 tokens"):
        await first


def test_any_one_prompt_fits_beside_others() -> None:
    assert MAX_READING_BYTES >= 4 * MAX_PROMPT_BYTES


def test_what_is_read_at_a_time_fits_into_memory() -> None:
    assert reading_bytes(64 << 30) == MAX_READING_BYTES
    assert reading_bytes(2 << 30) * 160 == pytest.approx(512 << 20, rel=0.01)


def test_a_reader_takes_what_the_machine_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_reading, "free_bytes", lambda: 640_000)
    assert BoundedReading()._max_bytes == 1000
