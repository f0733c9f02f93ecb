"""Requests of the maximum size or larger on a cluster of processes. They do not end other clients' streams.

In the past, prompts of several megabytes blocked the orchestrator's loop until its keeper killed it, messages at the
size limit broke the call that streams share, and long lists stopped the engine.
"""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from baton import AsyncClient
from baton.calls.resume import Reconnect
from baton.calls.streams import AsyncStream
from baton.errors import InvalidArgumentError, RequestCancelledError, ResourceExhaustedError
from baton.limits import MAX_LOGIT_BIASES, MAX_MESSAGE_BYTES, MAX_STOP_CHARS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from baton.sampling_params import SamplingParams, StructuredOutput
from baton.transport.channel import make_channel
from baton.types import FinishReason
from baton.v1 import common_pb2
from baton.v1 import orchestrator_pb2 as pb
from baton.v1.orchestrator_pb2_grpc import OrchestratorStub
from benchmarks.support.processor_time import main_threads_used_s, with_descendants
from deploy.config.file import WrittenConfig
from tests.support.clusters.clients import Answer
from tests.support.clusters.kept import KeptCluster, kept
from tests.support.eventually import eventually
from tests.support.models.texts import passage_ids
from tests.support.wire.hostile.forms import resident_bytes
from tests.support.wire.hostile.named_forms import CHAIN_OF_RULES, large_multiples

pytestmark = pytest.mark.integration

NUM_STREAMS = 8
NUM_CHOICES = 16
MAX_TOKENS = 2048
MOST_HELD_S = 1.5
"""Processor time that the orchestrator's loop may take between two tokens of a stream."""
DEAD_AFTER_S = 30.0
"""A crowded machine may hold up a sound orchestrator for many seconds."""
PROMPT_BYTES = 7 * 2**20
PLAIN = SamplingParams(max_tokens=1900, ignore_eos=True)
"""More than is waited for."""
LARGEST = SamplingParams(
    max_tokens=8,
    min_tokens=8,
    n=NUM_CHOICES,
    temperature=0.8,
    seed=5,
    stop=tuple("a" * (MAX_STOP_CHARS - 1) + chr(ord("A") + index) for index in range(MAX_STOP_STRINGS)),
    stop_token_ids=tuple(range(1000, 1000 + MAX_STOP_TOKEN_IDS)),
    logit_bias=dict.fromkeys(range(5000, 5000 + MAX_LOGIT_BIASES), 1.0),
)
FORMS = (
    StructuredOutput(grammar=CHAIN_OF_RULES),
    StructuredOutput(json='{"type": "integer", "multipleOf": 9999991}'),
    StructuredOutput(json='{"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}'),
    StructuredOutput(regex=r"(\p{L}|\p{N}|\w)*" * 2000),
)
MOST_GROWTH_BYTES = 300 * 2**20
"""Maximum growth of the memory of all processes through sixteen forms, of which eight are served."""
NEVER = Reconnect(num_connects=1, num_resumes=0)


@dataclass
class Watched:
    """A stream without resumption, and the processor time that the orchestrator's loop had used at each token."""

    stream: AsyncStream
    pid: int
    used_s: list[float] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def follow(self) -> None:
        """Read it until it is cancelled. Raises what it failed with."""
        async for event in self.stream:
            if event.token is not None:
                self.used_s += main_threads_used_s([self.pid]).values()
                self.begun.set()

    @property
    def longest_held_s(self) -> float:
        """Return the most processor time between two tokens."""
        return max(after - before for before, after in itertools.pairwise(self.used_s))


async def attack_by_prompts(target: str) -> None:
    """Three prompts of one word, then three of many words, of 7 MiB each."""
    async with AsyncClient(target, reconnect=NEVER) as client:
        for text in ("a" * PROMPT_BYTES, "hello world " * (PROMPT_BYTES // 12)):
            streams = [client.generate(text, max_tokens=4) for _ in range(3)]
            for ended in await asyncio.gather(*(stream.collect() for stream in streams), return_exceptions=True):
                assert isinstance(ended, InvalidArgumentError | ResourceExhaustedError), ended


async def attack_by_a_message(target: str) -> None:
    """Requests of 16 bytes less than a message may have, by a stop string."""
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[5]), sampling=common_pb2.SamplingParams(max_tokens=4, stop=["x" * 2**22])
    )
    request.sampling.stop[0] += "x" * (MAX_MESSAGE_BYTES - 16 - request.ByteSize())
    assert request.ByteSize() == MAX_MESSAGE_BYTES - 16
    async with make_channel(target) as channel:
        for _ in range(3):
            answer = Answer()
            with pytest.raises(InvalidArgumentError, match=r"sampling\.stop\[0\] has"):
                await answer.drain(OrchestratorStub(channel).Generate(request, timeout=60))


async def attack_by_lists(target: str) -> None:
    """Sixteen choices with the longest lists that are accepted: they are served."""
    async with AsyncClient(target, reconnect=NEVER) as client:
        answer = await client.generate("Once upon a time", params=LARGEST).collect()
    assert [choice.finish for choice in answer.choices] == [FinishReason.LENGTH] * NUM_CHOICES


async def attack_by_forms(target: str) -> None:
    """Forms that exceed the limits of their compiler: all are refused."""
    async with AsyncClient(target, reconnect=NEVER) as client:
        streams = [client.generate("a", max_tokens=4, structured_output=form) for form in FORMS]
        for ended in await asyncio.gather(*(stream.collect() for stream in streams), return_exceptions=True):
            assert isinstance(ended, InvalidArgumentError), ended


async def attack_by_large_forms(target: str) -> None:
    """Forms of 45 bytes that are compiled to as many bytes as is permitted, and beyond, all at once. No process keeps
    gigabytes of them, as a cache of a number of forms did."""

    def cluster_bytes() -> int:
        return resident_bytes(with_descendants([os.getpid()]) - {os.getpid()})

    async with AsyncClient(target, reconnect=NEVER) as client:
        await client.generate("a", max_tokens=4, structured_output=StructuredOutput(regex="[0-9]+")).collect()
        before_bytes = cluster_bytes()  # every process has loaded its compiler
        streams = [client.generate("a", max_tokens=4, structured_output=form) for form in large_multiples()]
        ends = await asyncio.gather(*(stream.collect() for stream in streams), return_exceptions=True)
        assert [isinstance(end, BaseException) for end in ends] == [False] * 8 + [True] * 8, ends
        assert {type(end) for end in ends[8:]} == {InvalidArgumentError}, ends
        usages = [end.usage for end in ends if not isinstance(end, BaseException)]
        assert [usage and usage.num_attempts for usage in usages] == [1] * 8
        assert cluster_bytes() - before_bytes < MOST_GROWTH_BYTES
        assert not any(group.is_broken for group in (await client.cluster_state()).groups)


@pytest.fixture
async def running(smollm2: Path) -> AsyncIterator[KeptCluster]:
    """A chain of one rank and one generation group, each with one thread."""
    generate = {"num_threads": 1, "num_slots": NUM_STREAMS + NUM_CHOICES, "max_slot_tokens": MAX_TOKENS}
    config = WrittenConfig(
        {
            "model": {"dtype": "float32"},
            "prefill": {"num_ranks": 1},
            "generate": generate,
            "orchestrator": {"disaggregation": "always", "port": 0},
            "supervision": {"dead_after_s": DEAD_AFTER_S},
        }
    ).local.config
    made = KeptCluster(config=config, folder=smollm2)
    async with kept(made):
        yield made


@pytest.mark.ci
async def test_hostile_requests_end_nobody_elses_stream(running: KeptCluster) -> None:
    assert running.keeper is not None
    pid = running.keeper.pid
    async with AsyncClient(running.target, reconnect=NEVER) as client:
        prompts = [passage_ids(running.folder, 40, start=50 * n) for n in range(NUM_STREAMS)]
        watched = [Watched(client.generate(token_ids=ids, params=PLAIN), pid) for ids in prompts]
        following = [asyncio.create_task(each.follow()) for each in watched]
        await asyncio.wait_for(asyncio.gather(*(each.begun.wait() for each in watched)), 60)
        attacks = (attack_by_prompts, attack_by_a_message, attack_by_lists, attack_by_forms, attack_by_large_forms)
        for attack in attacks:
            await attack(running.target)
        seen = [len(each.used_s) for each in watched]

        async def num_behind() -> int:
            return sum(len(each.used_s) < number + 5 for each, number in zip(watched, seen, strict=True))

        await eventually(num_behind, lambda number: number == 0)
        statuses = [each for each in (await client.requests()).requests if each.state == "streaming"]
        assert [(each.num_failures, each.usage.num_attempts) for each in statuses] == [(0, 1)] * NUM_STREAMS
        for each in watched:
            each.stream.cancel()
        ends = await asyncio.gather(*following, return_exceptions=True)
    assert {type(end) for end in ends} == {RequestCancelledError}, ends
    assert max(each.longest_held_s for each in watched) < MOST_HELD_S
    assert running.keeper.pid == pid, "the orchestrator was replaced"
