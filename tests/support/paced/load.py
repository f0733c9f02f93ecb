"""Plays a trace against a running cluster through the orchestrator. Requests are sent at the trace's times, whether or
not earlier ones have ended."""

import asyncio
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import grpc
import numpy as np

from baton.proto_types import params_to_proto
from baton.sampling_params import SamplingParams
from baton.v1 import orchestrator_pb2 as pb
from baton.v1.orchestrator_pb2_grpc import OrchestratorStub
from baton_lab.traffic.gaps import GapHistogram
from baton_lab.traffic.results import Results
from baton_lab.traffic.traces.trace import Trace
from tests.support.models.tiny_tokenizer import NUM_LETTERS
from tests.support.paced.hardware import PacedHardware

if TYPE_CHECKING:
    from baton.v1.orchestrator_pb2_grpc import OrchestratorAsyncStub

_NUM_FIRST = 4
"""Number of first requests, which only establish connections and are not measured."""


@dataclass
class Fate:
    """Result of one request. Times are in seconds from the start of the trace."""

    sent_s: float = 0.0
    token_s: list[float] = field(default_factory=list)
    """Time at which the client received each token."""
    token_ids: list[int] = field(default_factory=list)
    error: str = ""
    """gRPC status with which the request failed; empty if it succeeded."""
    finished: pb.Finished | None = None


@dataclass(frozen=True)
class Played:
    """Results of one trace as measured by the client."""

    trace: Trace
    seed: int
    fates: list[Fate]
    start_s: float
    """Start of the trace on the monotonic clock, in seconds."""

    def prompt(self, number: int) -> tuple[int, ...]:
        """Return the token ids of a request's prompt."""
        return random_letters(int(self.trace.prompt_tokens[number]), self.seed, number)

    def params(self, number: int) -> SamplingParams:
        return greedy(int(self.trace.output_tokens[number]))

    @property
    def errors(self) -> list[str]:
        """Return the errors of failed requests."""
        return [fate.error for fate in self.fates if fate.error]

    def results(self, group_s: float = 0.0) -> Results:
        """Return the results in the form of a simulation's results."""
        gaps = GapHistogram()
        for fate in self.fates:
            for before_s, after_s in pairwise(fate.token_s):
                gaps.add(after_s - before_s, 1)
        ends = [(fate.token_s[0], fate.token_s[-1]) if fate.finished else (np.nan, np.nan) for fate in self.fates]
        first_s, end_s = np.array(ends, dtype=np.float64).T
        return Results(self.trace, first_s, end_s, gaps, group_s, num_events=0, num_cached_tokens=0)


async def play(channel: grpc.aio.Channel, trace: Trace, seed: int = 0) -> Played:
    """Play the whole trace, and return when the last request has ended. Prompts are random and have no common
    prefixes."""
    stub: OrchestratorAsyncStub = OrchestratorStub(channel)
    requests = await asyncio.to_thread(_requests, trace, seed)
    fates = [Fate() for _ in requests]
    start_s = time.monotonic() + 0.1
    tasks = []
    for at_s, request, fate in zip(trace.arrivals_s.tolist(), requests, fates, strict=True):
        await asyncio.sleep(max(start_s + at_s - time.monotonic(), 0.0))
        tasks.append(asyncio.create_task(_ask(stub, request, fate, start_s)))
    await asyncio.gather(*tasks)
    return Played(trace, seed, fates, start_s)


async def calibrate(channel: grpc.aio.Channel, hardware: PacedHardware, num_requests: int = 16) -> PacedHardware:
    """Measure on an idle cluster the overheads that are not paced: the time per request outside its chain, measured by
    the client, and the time of a message between ranks. The orchestrator learns the paced durations meanwhile."""
    arrivals_s, tokens = np.linspace(0.0, 0.5 * num_requests, num_requests), np.resize([300, 1200], num_requests)
    played = await play(channel, Trace("alone", arrivals_s, tokens, np.ones(num_requests, np.int64)), seed=-1)
    besides: list[float] = []
    links: defaultdict[float, list[float]] = defaultdict(list)
    for at_s, fate in list(zip(arrivals_s.tolist(), played.fates, strict=True))[_NUM_FIRST:]:
        assert fate.finished is not None, fate.error
        ranks = fate.finished.timings.prefill.ranks
        chain_ns = max(rank.end_ns for rank in ranks) - min(rank.start_ns for rank in ranks)
        besides.append(fate.token_s[0] - at_s - chain_ns / 1e9)
        for rank in ranks:
            if rank.num_messages_sent:
                links[rank.num_bytes_sent / rank.num_messages_sent].append(rank.send_s / rank.num_messages_sent)
    points = tuple((num_bytes, statistics.median(seconds)) for num_bytes, seconds in sorted(links.items()))
    return hardware.measured(statistics.median(besides), points)


def random_letters(num_tokens: int, seed: int, number: int) -> tuple[int, ...]:
    """Return a prompt that is unique for each seed and number of a request."""
    return tuple(random.Random(f"{seed}/{number}").choices(range(NUM_LETTERS), k=num_tokens))


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)


def _requests(trace: Trace, seed: int) -> Sequence[pb.GenerateRequest]:
    lengths = zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True)
    return [
        pb.GenerateRequest(
            request_id=f"{seed}-{number}",
            token_ids=pb.TokenIds(ids=random_letters(num_prompt, seed, number)),
            sampling=params_to_proto(greedy(num_output)),
            seeded=True,
        )
        for number, (num_prompt, num_output) in enumerate(lengths)
    ]


async def _ask(stub: "OrchestratorAsyncStub", request: pb.GenerateRequest, fate: Fate, start_s: float) -> None:
    fate.sent_s = time.monotonic() - start_s
    try:
        async for event in stub.Generate(request):
            match event.WhichOneof("event"):
                case "token":
                    fate.token_s.append(time.monotonic() - start_s)
                    fate.token_ids.append(event.token.token.token_id)
                case "finished":
                    fate.finished = event.finished
    except grpc.aio.AioRpcError as error:
        fate.error = f"{error.code().name}: {error.details()}"
