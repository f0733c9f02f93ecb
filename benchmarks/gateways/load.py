"""Client process of the gateway benchmark. It runs thousands of streams, and checks each token of each stream."""

import asyncio
import contextlib
import random
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from baton.transport.channel import make_channel
from baton.v1 import common_pb2, generate_pb2
from baton.v1 import orchestrator_pb2 as pb
from baton.v1.orchestrator_pb2_grpc import OrchestratorStub
from benchmarks.gateways.engines import FIRST_ID
from benchmarks.gateways.process import Answer, usage

NUM_CONNECTIONS = 8
PROMPT = b"The quick brown fox jumps over the lazy dog, and then it sleeps in the shade of an old oak tree."
"""Prompt of about two dozen tokens."""


@dataclass(frozen=True)
class Streams:
    """Request to open streams: their number, their length, and the period in which they start."""

    num_streams: int
    max_tokens: int
    within_s: float
    """Length in seconds of the period in which the streams start. Their start times in it are random."""


@dataclass
class Seen:
    """Record of what the clients have received so far: numbers of tokens and of complete streams, errors, and times."""

    num_tokens: int = 0
    num_done: int = 0
    """Number of streams that ended correctly: all tokens arrived in order, followed by the last message."""
    errors: list[str] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    """Time to first token of each stream in seconds, from the start of its call."""
    late_ms: list[float] = field(default_factory=list)
    """Time from the engine to the client for each token, in milliseconds."""


class Clients(ABC):
    """Base class of the clients in this process. Subclasses implement the protocol (gRPC or HTTP) of their streams."""

    def __init__(self) -> None:
        self._running: list[asyncio.Task[None]] = []
        self._begun = asyncio.Event()
        self._asked = Streams(0, 0, 0.0)
        self.seen = Seen()

    @abstractmethod
    async def _one(self, number: int, at_s: float) -> None:
        """Run stream `number`, which starts in `at_s` seconds, to its end."""

    async def open(self, asked: Streams) -> None:
        """Start the streams that `asked` describes. Return when each has received its first token or has ended."""
        self._asked, self.seen = asked, Seen()
        self._begun.clear()
        rng = random.Random(0)
        starts_s = sorted(rng.uniform(0, asked.within_s) for _ in range(asked.num_streams))
        self._running = [asyncio.create_task(self._one(number, at_s)) for number, at_s in enumerate(starts_s)]
        await self._begun.wait()

    async def drain(self) -> Seen:
        """Wait until all streams have ended, and return what they have received."""
        await asyncio.gather(*self._running)
        return self.seen

    async def answer(self, question: Any) -> Any:
        """Answer a question that the parent process sent:

        - a `Streams` object opens streams; the answer is sent when all of them have received their first token
        - `seen` returns the number of tokens received so far, and the delays of the tokens since the last `seen`
        - `usage` returns the resources that the process has used
        - `drain` waits until all streams have ended, and returns everything that they have received
        """
        if isinstance(question, Streams):
            return await self.open(question)
        if question == "seen":
            late_ms, self.seen.late_ms = self.seen.late_ms, []
            return self.seen.num_tokens, late_ms
        if question == "usage":
            return usage()
        assert question == "drain", question
        return await self.drain()

    def _note(self) -> None:
        """Record that a stream has received its first token or has failed."""
        if len(self.seen.first_s) + len(self.seen.errors) >= self._asked.num_streams:
            self._begun.set()


class Load(Clients):
    """Clients whose streams are gRPC calls."""

    def __init__(self, target: str) -> None:
        super().__init__()
        self._channels = [make_channel(target) for _ in range(NUM_CONNECTIONS)]
        self._stubs = [OrchestratorStub(channel) for channel in self._channels]

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def _one(self, number: int, at_s: float) -> None:
        await asyncio.sleep(at_s)  # the stream's time of arrival
        sampling = common_pb2.SamplingParams(max_tokens=self._asked.max_tokens, ignore_eos=True)
        request = pb.GenerateRequest(prompt=PROMPT, sampling=sampling)
        try:
            await self._follow(self._stubs[number % NUM_CONNECTIONS].Generate(request))
            self.seen.num_done += 1
        except grpc.aio.AioRpcError as error:
            self.seen.errors.append(f"{error.code()}: {error.details()}")
        except ValueError as error:
            self.seen.errors.append(str(error))
        self._note()

    async def _follow(self, call: "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateEvent]") -> None:
        """Read a stream to its end. Raises ValueError if a token is missing or out of order."""
        seen, called_s, num_tokens, ended = self.seen, time.monotonic(), 0, False
        while isinstance(event := await call.read(), pb.GenerateEvent):
            if event.HasField("token"):
                token = event.token
                ended = token.finish == generate_pb2.FINISH_REASON_LENGTH
                if not token.HasField("token"):
                    continue  # an end without a token
                if token.index != num_tokens or token.token.token_id != FIRST_ID + num_tokens:
                    raise ValueError(f"token {token.index} where {num_tokens} is due")
                num_tokens += 1
                seen.num_tokens += 1
                seen.late_ms.append((time.time_ns() - token.unix_ns) / 1e6)
                if num_tokens == 1:
                    seen.first_s.append(time.monotonic() - called_s)
                    self._note()
            elif event.HasField("finished") and not (ended and num_tokens == self._asked.max_tokens):
                raise ValueError(f"finished after {num_tokens} of {self._asked.max_tokens} tokens")
        if await call.code() is not grpc.StatusCode.OK or not ended:
            raise ValueError(f"ended with {await call.code()}: {await call.details()}")


@contextlib.asynccontextmanager
async def load(target: str) -> AsyncIterator[tuple[None, Answer]]:
    """Main function of a process that runs gRPC clients. `Clients.answer` lists the questions that the process
    answers."""
    clients = Load(target)
    try:
        yield None, clients.answer
    finally:
        await clients.close()
