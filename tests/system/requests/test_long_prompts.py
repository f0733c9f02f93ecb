"""Prompts of 8 MiB, read by the real server and by a gateway in front of it. They are refused while other requests
continue.

The tokenizer is the sample model's own. Server, gateway and client share one event loop, which must not be blocked.
"""

import math
import time
import timeit
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import grpc
import pytest

from baton.errors import InvalidArgumentError
from baton.limits import MAX_MESSAGE_BYTES
from baton.process.clock import SystemClock
from baton.results.completion import ModelInfo
from baton.text.tokenizer import Tokenizer
from baton.transport.channel import make_channel
from baton.transport.status_interceptor import translate_rpc_errors
from baton.v1 import orchestrator_pb2 as pb
from orchestrator.api.checks import RequestValidator
from orchestrator.api.frontend import SERVICE, OrchestratorServer
from orchestrator.api.gateway import GrpcGateway, ask_model
from orchestrator.composition import build_orchestrator
from orchestrator.membership.members import Membership
from tests.support.clusters.planners import linear_planner
from tests.support.kernels.os_memory import peak_bytes, process_bytes, reset_peak
from tests.support.wire.held_loop import watching_loop
from tests.support.wire.secret import SECRET

pytestmark = pytest.mark.integration

HOST = "127.0.0.1"
SIZE = 8 * 2**20
MODEL = ModelInfo("smollm2", 8192, 49152, "float32", True, "layout")
MAX_HELD_S = 0.1
"""Seconds of processor time for which a callback may keep the loop."""
MAX_HELD_PARSES = 3
"""The same in times that this machine needs to parse the message, which the loop does, where that is more."""
NUM_TRIES = 3
"""The first request may make the process grow; a later one finds that memory free."""
MAX_GROWTH_BYTES = 200 * 2**20


def chat(*contents: str) -> pb.Chat:
    return pb.Chat(messages=[pb.ChatMessage(role="user", content=content) for content in contents])


LONG: dict[str, Callable[[], pb.GenerateRequest]] = {
    "words": lambda: pb.GenerateRequest(prompt=b"hello world " * (SIZE // 12)),
    "one word": lambda: pb.GenerateRequest(prompt=b"a" * SIZE),
    "emoji": lambda: pb.GenerateRequest(prompt="\U0001f308".encode() * (SIZE // 4)),
    "special tokens": lambda: pb.GenerateRequest(prompt=b"<|im_end|>" * (SIZE // 10)),
    "no UTF-8": lambda: pb.GenerateRequest(prompt=b"a" * (SIZE - 1) + b"\xff"),
    "chat": lambda: pb.GenerateRequest(chat=chat("hello world " * (SIZE // 12))),
    "long chat": lambda: pb.GenerateRequest(chat=chat(*["a"] * 200_000)),
    "token ids": lambda: pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * SIZE)),
}


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.load(smollm2)


@pytest.fixture(params=["orchestrator", "gateway"])
async def channel(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> AsyncIterator[grpc.aio.Channel]:
    """To the orchestrator, or to a gateway before it."""
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        orchestrator = build_orchestrator(Membership(), linear_planner(), clock, secret=SECRET)
        server = await OrchestratorServer.start(orchestrator, RequestValidator(tokenizer, MODEL, ()), (HOST, 0))
        stack.push_async_callback(server.stop)
        port = server.port
        if request.param == "gateway":
            behind = await stack.enter_async_context(make_channel(f"{HOST}:{port}"))
            gateway = await GrpcGateway.start(behind, tokenizer, await ask_model(behind, 10), clock=clock, host=HOST)
            stack.push_async_callback(gateway.stop)
            port = gateway.port
        yield await stack.enter_async_context(make_channel(f"{HOST}:{port}"))


@pytest.mark.parametrize("name", LONG)
async def test_a_prompt_of_8_mib_keeps_the_loop_from_nothing(channel: grpc.aio.Channel, name: str) -> None:
    request = LONG[name]().SerializeToString()  # here: what a client does is its own
    assert len(request) < MAX_MESSAGE_BYTES
    await refused(channel, pb.GenerateRequest(model="other").SerializeToString())  # connected, and all is loaded
    most_s, least_bytes = max(MAX_HELD_S, MAX_HELD_PARSES * parse_s(request)), math.inf
    for _ in range(NUM_TRIES):
        before_bytes = process_bytes()
        reset_peak()
        async with watching_loop() as held:
            text = await refused(channel, request)
        assert "limit" in text or "takes at most" in text or "not UTF-8" in text
        assert held.most_s < most_s
        least_bytes = min(least_bytes, peak_bytes() - before_bytes)
        if least_bytes < MAX_GROWTH_BYTES:
            break
    assert least_bytes < MAX_GROWTH_BYTES


def parse_s(request: bytes) -> float:
    """Return the least seconds of processor time of three parses: a slow machine may need MAX_HELD_S for token ids."""
    parse = partial(pb.GenerateRequest.FromString, request)
    return min(timeit.repeat(parse, timer=time.thread_time, number=1, repeat=3))


async def refused(channel: grpc.aio.Channel, request: bytes) -> str:
    """What a client is told that sends these bytes."""
    generate: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(f"/{SERVICE}/Generate")
    with pytest.raises(InvalidArgumentError) as caught, translate_rpc_errors():
        await generate(request, timeout=60).read()
    return str(caught.value)
