"""The largest accepted request delays a running stream no more than an ordinary request does.

Orchestrator, prefill group, generation group and client run in one process, whose processor time is measured.
"""

import asyncio
import itertools
import statistics
import time
import timeit
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest

from baton.errors import InvalidArgumentError
from baton.limits import MAX_LOGIT_BIASES, MAX_STOP_CHARS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from baton.sampling_params import SamplingParams
from baton.v1 import common_pb2
from baton.v1 import orchestrator_pb2 as pb
from tests.support.clusters.clients import Answer
from tests.support.clusters.cluster import MAX_TOKENS, BareCluster, cluster
from tests.support.engines.generation import prompt
from tests.support.models.tiny_tokenizer import VOCAB_SIZE
from tests.support.wire.held_loop import watching_loop

pytestmark = pytest.mark.integration

NUM_CHOICES = 16
NUM_ROUNDS = 5
RUNNING = SamplingParams(max_tokens=MAX_TOKENS - 20, ignore_eos=True)
PLAIN = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.5, seed=1, n=NUM_CHOICES)
LARGEST = replace(
    PLAIN,
    stop=tuple("a" * (MAX_STOP_CHARS - 1) + chr(ord("A") + index) for index in range(MAX_STOP_STRINGS)),
    stop_token_ids=tuple(range(VOCAB_SIZE))[:MAX_STOP_TOKEN_IDS],
    logit_bias=dict.fromkeys(range(VOCAB_SIZE)[:MAX_LOGIT_BIASES], 0.5),
    min_tokens=20,
)
MAX_HELD_S = 0.05
"""Seconds of processor time for which a callback may keep the loop."""
MAX_REFUSAL_S = 0.25
"""The same where megabytes are written, sent and parsed on the one loop."""
MAX_REFUSAL_COPIES = 2
"""The same in times that this machine needs to write and parse the message, where that is more."""


@dataclass
class DraftWindow:
    """How a request delayed what ran beside it, in seconds of processor time."""

    held_s: float
    """The longest time for which a callback kept the loop."""
    longest_step_s: float
    """The most that the whole process used between two tokens of the running stream."""


@pytest.fixture
async def running() -> AsyncIterator[BareCluster]:
    async with cluster(num_ranks=1, num_slots=NUM_CHOICES + 1) as made:
        yield made


async def beside(running: BareCluster, params: SamplingParams) -> DraftWindow:
    """Send a request while another stream runs, and return how both that stream and the loop were delayed."""
    answer, call = Answer(), running.open(running.request(prompt(12), RUNNING))
    await answer.read(call, 1)
    times_s: list[float] = []
    request = running.request(prompt(30), params)
    async with watching_loop() as held:
        asked = asyncio.create_task(running.ask(request))
        while not asked.done():
            event = await call.read()
            assert isinstance(event, pb.GenerateEvent) and not event.HasField("finished"), "it ran too short"
            times_s.append(time.process_time())
    assert len((await asked).others) == NUM_CHOICES - 1
    call.cancel()
    return DraftWindow(held.most_s, max(after - before for before, after in itertools.pairwise(times_s)))


async def test_the_largest_request_delays_others_as_a_plain_one_does(running: BareCluster) -> None:
    await beside(running, PLAIN)  # what is made at first use
    calm: list[DraftWindow] = []
    loaded: list[DraftWindow] = []
    for _ in range(NUM_ROUNDS):
        calm.append(await beside(running, PLAIN))
        loaded.append(await beside(running, LARGEST))
    assert min(each.held_s for each in loaded) < max(MAX_HELD_S, 2 * min(each.held_s for each in calm))
    assert min(each.longest_step_s for each in loaded) < 2 * statistics.median(each.longest_step_s for each in calm)


@pytest.mark.parametrize("name", ["stop", "stop_token_ids", "logit_bias"])
async def test_lists_of_megabytes_are_refused_by_their_length(running: BareCluster, name: str) -> None:
    sampling = common_pb2.SamplingParams(max_tokens=4, n=NUM_CHOICES)
    match name:
        case "stop":
            sampling.stop.extend(["a"] * 2**20)
        case "stop_token_ids":
            sampling.stop_token_ids.extend([7] * 2**22)
        case "logit_bias":
            sampling.logit_bias.update(dict.fromkeys(range(2**19), 1.0))
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), sampling=sampling)
    most_s = max(MAX_REFUSAL_S, MAX_REFUSAL_COPIES * copy_s(request))
    async with watching_loop() as held:
        with pytest.raises(InvalidArgumentError, match=rf"sampling\.{name} has \d+ entries: use at most"):
            await running.ask(request)
    assert held.most_s < most_s


def copy_s(request: pb.GenerateRequest) -> float:
    """The least processor time in which the message is written and parsed, of some tries."""

    def copy() -> None:
        pb.GenerateRequest.FromString(request.SerializeToString())

    return min(timeit.repeat(copy, timer=time.thread_time, number=1, repeat=3))
