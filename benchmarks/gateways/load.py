"""The clients' process of the gateway benchmark: thousands of streams, each checked token by token."""

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
"""A prompt of some two dozen tokens."""


@dataclass(frozen=True)
class Streams:
    """The streams to open."""

    num_streams: int
    max_tokens: int
    within_s: float
    """Seconds within which the streams begin, at random times."""


@dataclass
class Seen:
    """Tokens, streams and errors that the clients have seen so far."""

    num_tokens: int = 0
    num_done: int = 0
    """Streams that ended as they should: all tokens, in order, and the last message."""
    errors: list[str] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    """Seconds from each stream's call to its first token."""
    late_ms: list[float] = field(default_factory=list)
    """Milliseconds of each token from the engine to the client."""


class Clients(ABC):
    """Streams that run in this process, over any protocol."""

    def __init__(self) -> None:
        self._running: list[asyncio.Task[None]] = []
        self._begun = asyncio.Event()
        self._asked = Streams(0, 0, 0.0)
        self.seen = Seen()

    @abstractmethod
    async def _one(self, number: int, at_s: float) -> None:
        """Run the stream of this number, which begins in `at_s` seconds, to its end."""

    async def open(self, asked: Streams) -> None:
        """Open the streams; return when all have their first token, or have ended."""
        self._asked, self.seen = asked, Seen()
        self._begun.clear()
        rng = random.Random(0)
        starts_s = sorted(rng.uniform(0, asked.within_s) for _ in range(asked.num_streams))
        self._running = [asyncio.create_task(self._one(number, at_s)) for number, at_s in enumerate(starts_s)]
        await self._begun.wait()

    async def drain(self) -> Seen:
        """Wait until all streams have ended; return what they received."""
        await asyncio.gather(*self._running)
        return self.seen

    async def answer(self, question: Any) -> Any:
        """Return the answer to a question to the clients' process. Streams opens them, and is answered when all run.
        `seen` returns the number of tokens received, and the delays of those since the last `seen`. `usage` returns
        the resources that the process has used. `drain` waits until all streams have ended."""
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
        """Note that a stream has its first token, or has failed."""
        if len(self.seen.first_s) + len(self.seen.errors) >= self._asked.num_streams:
            self._begun.set()


class Load(Clients):
    """The streams that run in this process, over gRPC."""

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
        """Follow a stream to its end. Raises ValueError when a token is missing or out of place."""
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
    """Run the clients as a process's role, which answers as `Clients.answer` says."""
    clients = Load(target)
    try:
        yield None, clients.answer
    finally:
        await clients.close()
