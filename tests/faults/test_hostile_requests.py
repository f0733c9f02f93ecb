"""Requests that are as large as they may be, or larger, on a cluster of processes: they end nobody else's stream.

Prompts of megabytes once kept the orchestrator's loop until its keeper killed it, messages at the limit broke the call
that streams share, and lists of any length stopped the engine.
"""

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from baton import AsyncClient
from baton.calls.resume import Reconnect
from baton.calls.streams import AsyncStream
from baton.channel_options import MAX_MESSAGE_BYTES
from baton.errors import BatonError, InvalidArgumentError, ResourceExhaustedError
from baton.sampling_params import (
    MAX_LOGIT_BIASES,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from baton.types import FinishReason
from baton.v1 import common_pb2
from baton.v1 import orchestrator_pb2 as pb
from baton.v1.orchestrator_pb2_grpc import OrchestratorStub
from deploy.config.file import make_local_config
from tests.support.clusters.clients import Answer
from tests.support.clusters.kept import KeptCluster, kept
from tests.support.models.texts import passage_ids
from transport.channel import make_channel

pytestmark = pytest.mark.integration

NUM_STREAMS = 8
NUM_CHOICES = 16
MAX_TOKENS = 2048
MOST_PAUSE_S = 3.0
DEAD_AFTER_S = 10.0
"""Twice the default: a crowded machine may hold up a sound orchestrator for that long."""
NUM_TRIES = 3
"""On a crowded machine a stream may be held up for as long, in one of them or another."""
PROMPT_BYTES = 7 * 2**20
PLAIN = SamplingParams(max_tokens=300, ignore_eos=True)
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
NEVER = Reconnect(num_connects=1, num_resumes=0)


@dataclass
class Watched:
    """A stream without resumption, and when its tokens came."""

    stream: AsyncStream
    times_s: list[float] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def follow(self) -> None:
        """Reads it to its end; raises what it failed with."""
        async for event in self.stream:
            if event.token is not None:
                self.times_s.append(time.monotonic())
                self.begun.set()

    @property
    def longest_pause_s(self) -> float:
        """Between two of its tokens."""
        return max(after - before for before, after in itertools.pairwise(self.times_s))


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


@pytest.fixture
async def running(smollm2: Path) -> AsyncIterator[KeptCluster]:
    """A chain of one rank and one generation group, each with one thread."""
    generate = {"num_threads": 1, "num_slots": NUM_STREAMS + NUM_CHOICES, "max_slot_tokens": MAX_TOKENS}
    config = make_local_config(
        {
            "model": {"dtype": "float32"},
            "prefill": {"num_ranks": 1},
            "generate": generate,
            "orchestrator": {"disaggregation": "always", "port": 0},
            "supervision": {"dead_after_s": DEAD_AFTER_S},
        }
    )
    made = KeptCluster(config=config, folder=smollm2)
    async with kept(made):
        yield made


@pytest.mark.ci
async def test_hostile_requests_end_nobody_elses_stream(running: KeptCluster) -> None:
    assert running.keeper is not None
    pid, least_s = running.keeper.pid, math.inf
    for _ in range(NUM_TRIES):
        least_s = min(least_s, await longest_pause_s(running.target, running.folder))
        assert running.keeper.pid == pid, "the orchestrator was replaced"
        if least_s < MOST_PAUSE_S:
            break
    assert least_s < MOST_PAUSE_S


async def longest_pause_s(target: str, smollm2: Path) -> float:
    """Of streams beside which hostile requests come; each stream has one attempt, to its end."""
    async with AsyncClient(target, reconnect=NEVER) as client:
        prompts = [passage_ids(smollm2, 40, start=50 * n) for n in range(NUM_STREAMS)]
        watched = [Watched(client.generate(token_ids=ids, params=PLAIN)) for ids in prompts]
        following = [asyncio.create_task(each.follow()) for each in watched]
        await asyncio.wait_for(asyncio.gather(*(each.begun.wait() for each in watched)), 60)
        for attack in (attack_by_prompts, attack_by_a_message, attack_by_lists):
            await attack(target)
            assert not any(task.done() for task in following), "streams ended before the attack did"
        ends = await asyncio.gather(*following, return_exceptions=True)
    assert [end for end in ends if isinstance(end, BatonError)] == []
    for each in watched:
        assert len(each.times_s) == PLAIN.max_tokens
        assert each.stream.usage is not None and each.stream.usage.num_attempts == 1
    return max(each.longest_pause_s for each in watched)
