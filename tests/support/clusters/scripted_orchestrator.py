"""Scripted Orchestrator service: tokens are a function of their position, and faults are given by number of call.

Servers and streams are real; only the computation of tokens is replaced. Output token i has the id 1000 + i and the
text "<i> ". The seed is 77 unless the request sets one. If a request already contains output tokens of its first
choice, the stream continues after them.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from baton import __version__
from baton.errors import BatonError
from baton.transport.channel import make_server
from baton.v1 import common_pb2, generate_pb2, orchestrator_pb2, orchestrator_pb2_grpc, prefill_pb2
from tests.support.wire.rpc import listening

Context = grpc.aio.ServicerContext[Any, Any]
Events = AsyncIterator[orchestrator_pb2.GenerateEvent]

MODEL = orchestrator_pb2.Model(
    name="scripted", max_tokens=4096, vocab_size=2000, dtype="float32", has_chat_template=True, layout_fingerprint="f"
)
STATE = orchestrator_pb2.ClusterState(
    groups=[
        orchestrator_pb2.GroupState(
            name="g0",
            role="generate",
            endpoints=["h:1"],
            is_ready=True,
            generation=generate_pb2.GenerationStatus(num_slots=8, num_free=7),
        ),
        orchestrator_pb2.GroupState(
            name="p0",
            role="prefill",
            endpoints=["h:2", "h:3"],
            epoch=3,
            ranks={1: prefill_pb2.PrefillStatus(epoch=3, num_jobs=2)},
        ),
    ],
    num_queued=2,
    num_running=1,
    num_degraded=4,
    version=__version__,
)
REQUESTS = orchestrator_pb2.RequestList(
    now_ns=2_000_000_000,
    requests=[
        orchestrator_pb2.RequestStatus(
            number=2, state="queued", timings=orchestrator_pb2.Timings(received_ns=1_000_000_000)
        ),
        orchestrator_pb2.RequestStatus(
            number=1,
            request_id="r1",
            tenant="default",
            state="finished",
            generation="g0",
            prefill="p0",
            usage=orchestrator_pb2.Usage(num_prompt_tokens=9, num_output_tokens=4, num_attempts=1),
            timings=orchestrator_pb2.Timings(
                received_ns=100, admitted_ns=200, leased_ns=300, first_token_ns=400, finished_ns=500
            ),
            reasons=[generate_pb2.FINISH_REASON_LENGTH],
        ),
    ],
)
TAIL = "tail"
"""Text that is sent with the end of a choice, not with a token."""


@dataclass
class Fault:
    """Fault of one call, which strikes after `after` new tokens. By default, the call has no fault."""

    after: int = 0
    error: BatonError | None = None
    hang: bool = False
    """Wait until cancelled."""
    end: bool = False
    """End the stream, without a last message."""
    skip: int = 0
    """Number of tokens that the stream skips before it continues."""
    repeat: int = 0
    """Number of tokens that the stream repeats before it continues."""
    before_started: bool = False
    """True if the fault strikes before the stream's first message (`started`)."""
    finish: generate_pb2.FinishReason.ValueType | None = None
    """Finish reason that the stream ends with, followed by `error` if it is set."""


@dataclass
class ScriptedOrchestrator(orchestrator_pb2_grpc.OrchestratorServicer):
    """Scripted service that records all requests. The n-th call has the n-th fault."""

    faults: Sequence[Fault] = ()
    words: Sequence[tuple[int, str]] = ()
    """Ids and texts of all output tokens of an answer. Empty: tokens are a function of their position."""
    requests: list[orchestrator_pb2.GenerateRequest] = field(default_factory=list)
    metadata: list[dict[str, str | bytes]] = field(default_factory=list)
    looks: list[dict[str, str | bytes]] = field(default_factory=list)
    """Metadata of each call of GetClusterState and GetRequests."""
    refuses: BatonError | None = None
    """Error that GetClusterState and GetRequests raise; None: they answer."""
    refuses_callers: BatonError | None = None
    """Error that GetModel raises; None: it answers."""
    hanging: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    async def Generate(self, request: orchestrator_pb2.GenerateRequest, context: Context) -> Events:
        """Stream the answer with its fault. Set `cancelled` when the client or the server ends the call early."""
        try:
            async for event in self._script(request, context):
                yield event
        except (asyncio.CancelledError, GeneratorExit):  # GeneratorExit: the call was cancelled during a write
            self.cancelled.set()
            raise

    async def _script(self, request: orchestrator_pb2.GenerateRequest, context: Context) -> Events:
        fault = self.faults[len(self.requests)] if len(self.requests) < len(self.faults) else Fault(after=2**31)
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata() or ()))
        if fault.before_started:
            await self._strike(fault)
        yield orchestrator_pb2.GenerateEvent(started=_started(request))
        if self.words:
            for event in self._told(request):
                yield event
            return
        first = len(request.outputs[0].token_ids) if request.outputs else 0
        indices = list(range(first, request.sampling.max_tokens))
        num_sent = first
        for position, index in enumerate(_bent(indices, fault)):
            if position == fault.after and not (fault.skip or fault.repeat):
                if fault.finish is not None:
                    break
                await self._strike(fault)
                return
            yield _token(index)
            num_sent = max(num_sent, index + 1)
        yield _end(num_sent, fault.finish or generate_pb2.FINISH_REASON_LENGTH)
        yield _finished(request)
        if fault.finish is not None and fault.error is not None:
            raise fault.error

    def _told(self, request: orchestrator_pb2.GenerateRequest) -> Iterator[orchestrator_pb2.GenerateEvent]:
        """Yield `words` for each choice, up to the request's limit on tokens."""
        told = self.words[: request.sampling.max_tokens]
        is_whole = len(told) == len(self.words)
        reason = generate_pb2.FINISH_REASON_STOP if is_whole else generate_pb2.FINISH_REASON_LENGTH
        for choice in range(max(1, request.sampling.n)):
            for index, (token_id, text) in enumerate(told):
                logprob = -0.5 if request.sampling.HasField("logprobs") else None
                yield _token(index, token_id=token_id, text=text, choice=choice, logprob=logprob)
            yield _end(len(told), reason, "", choice)
        usage = orchestrator_pb2.Usage(num_prompt_tokens=5, num_output_tokens=len(told), num_attempts=1)
        yield orchestrator_pb2.GenerateEvent(finished=orchestrator_pb2.Finished(usage=usage))

    async def GetModel(self, request: orchestrator_pb2.GetModelRequest, context: Context) -> orchestrator_pb2.Model:
        """Return the scripted model."""
        if self.refuses_callers is not None:
            raise self.refuses_callers
        return MODEL

    async def GetClusterState(
        self, request: orchestrator_pb2.GetClusterStateRequest, context: Context
    ) -> orchestrator_pb2.ClusterState:
        """Return the scripted state."""
        self._look(context)
        return STATE

    async def GetRequests(
        self, request: orchestrator_pb2.GetRequestsRequest, context: Context
    ) -> orchestrator_pb2.RequestList:
        """Return the scripted requests."""
        self._look(context)
        return REQUESTS

    def _look(self, context: Context) -> None:
        self.looks.append(dict(context.invocation_metadata() or ()))
        if self.refuses is not None:
            raise self.refuses

    async def _strike(self, fault: Fault) -> None:
        if fault.error is not None:
            raise fault.error
        if fault.hang:
            self.hanging.set()
            await asyncio.Event().wait()


@asynccontextmanager
async def serving(service: ScriptedOrchestrator, port: int = 0) -> AsyncIterator[str]:
    """Serve `service` on 127.0.0.1, and yield its address (host:port). At the end, all calls are ended at once, as when
    an orchestrator's process dies."""
    server = make_server()
    orchestrator_pb2_grpc.add_OrchestratorServicer_to_server(service, server)
    async with listening(server, port) as bound:
        yield f"127.0.0.1:{bound}"


def text_of(num_tokens: int) -> str:
    """Return the whole text of a finished stream of `num_tokens` tokens."""
    return "".join(f"{index} " for index in range(num_tokens)) + TAIL


def _bent(indices: list[int], fault: Fault) -> list[int]:
    kept = indices[: fault.after]
    return kept + indices[fault.after + fault.skip - fault.repeat :] if fault.skip or fault.repeat else indices


def _started(request: orchestrator_pb2.GenerateRequest) -> orchestrator_pb2.Started:
    seed = request.sampling.seed if request.seeded else 77
    return orchestrator_pb2.Started(
        request_id=request.request_id, seed=seed, num_prompt_tokens=5, model=MODEL.name, exact=True
    )


def _token(
    index: int,
    *,
    token_id: int | None = None,
    text: str | None = None,
    choice: int = 0,
    logprob: float | None = None,
) -> orchestrator_pb2.GenerateEvent:
    token = common_pb2.SampledToken(token_id=1000 + index if token_id is None else token_id, logprob=logprob)
    text = f"{index} " if text is None else text
    return orchestrator_pb2.GenerateEvent(
        token=generate_pb2.TokenEvent(index=index, token=token, text=text, unix_ns=1, choice=choice)
    )


def _end(
    num_tokens: int, reason: generate_pb2.FinishReason.ValueType, text: str = TAIL, choice: int = 0
) -> orchestrator_pb2.GenerateEvent:
    return orchestrator_pb2.GenerateEvent(
        token=generate_pb2.TokenEvent(index=num_tokens, text=text, unix_ns=4 * 10**9, finish=reason, choice=choice)
    )


def _finished(request: orchestrator_pb2.GenerateRequest) -> orchestrator_pb2.GenerateEvent:
    usage = orchestrator_pb2.Usage(num_prompt_tokens=5, num_output_tokens=request.sampling.max_tokens, num_attempts=1)
    rank = prefill_pb2.RankTiming(rank=0, tokens=common_pb2.TokenRange(start=0, end=5), num_bytes_pushed=9)
    timings = orchestrator_pb2.Timings(
        received_ns=10**9,
        first_token_ns=3 * 10**9,
        finished_ns=4 * 10**9,
        prefill=orchestrator_pb2.PrefillTrace(ranks=[rank]),
    )
    return orchestrator_pb2.GenerateEvent(finished=orchestrator_pb2.Finished(usage=usage, timings=timings))
