"""Requests of a message's maximum size. Only these requests are refused, and other streams continue in their first
attempt."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from baton.errors import InvalidArgumentError
from baton.limits import MAX_MESSAGE_BYTES
from baton.sampling_params import SamplingParams
from baton.v1 import common_pb2
from baton.v1 import orchestrator_pb2 as pb
from tests.support.clusters.clients import Answer
from tests.support.clusters.cluster import BareCluster, cluster
from tests.support.engines.generation import prompt, reference_ids

pytestmark = pytest.mark.integration

NUM_STREAMS = 10
PLAIN = SamplingParams(max_tokens=60, ignore_eos=True)


@pytest.fixture
async def running() -> AsyncIterator[BareCluster]:
    async with cluster() as made:
        yield made


def asking(**sampling: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[5]),
        sampling=common_pb2.SamplingParams(max_tokens=4, **sampling),  # type: ignore[arg-type]
    )


def filled(request: pb.GenerateRequest) -> pb.GenerateRequest:
    """The request with its one stop string so long that the message is 16 bytes below the limit."""
    request.sampling.stop[:] = ["x" * (MAX_MESSAGE_BYTES - 16 - request.ByteSize() - 16)]
    request.sampling.stop[0] += "x" * (MAX_MESSAGE_BYTES - 16 - request.ByteSize())
    assert request.ByteSize() == MAX_MESSAGE_BYTES - 16
    return request


LARGEST: dict[str, Callable[[], pb.GenerateRequest]] = {
    "stop string": lambda: filled(asking(stop=["x"])),
    "stop token ids": lambda: asking(stop_token_ids=[7] * (MAX_MESSAGE_BYTES - 64)),
    "outputs": lambda: pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[5]), outputs=[common_pb2.Output(token_ids=[7] * (MAX_MESSAGE_BYTES - 64))]
    ),
    "token ids": lambda: pb.GenerateRequest(token_ids=pb.TokenIds(ids=[7] * (MAX_MESSAGE_BYTES - 64))),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "stop string" else pytest.mark.ci) for name in LARGEST]
)
async def test_ten_streams_survive_the_largest_message(running: BareCluster, name: str) -> None:
    largest = LARGEST[name]()
    answers = [Answer() for _ in range(NUM_STREAMS)]
    calls = [running.open(running.request(prompt(10 + index), PLAIN)) for index in range(NUM_STREAMS)]
    await asyncio.gather(*(answer.read(call, 1) for answer, call in zip(answers, calls, strict=True)))
    for gate in running.group_gates:
        gate.shut()  # all ten are under way when the message comes
    try:
        with pytest.raises(InvalidArgumentError):
            await running.ask(largest)
    finally:
        for gate in running.group_gates:
            gate.open()
    await asyncio.gather(*(answer.drain(call) for answer, call in zip(answers, calls, strict=True)))
    for index, answer in enumerate(answers):
        assert answer.finished is not None and answer.finished.usage.num_attempts == 1
        assert answer.token_ids == reference_ids(running.decoder, prompt(10 + index), PLAIN)
