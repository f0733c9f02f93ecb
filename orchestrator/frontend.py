"""The orchestrator over gRPC: checks what clients ask, and puts the controller's events on the wire.

First and last step of a request's way (DESIGN.md, section 4). On the process's asyncio loop, tokenizing in threads.
Errors become statuses, RetryInfo included, in the interceptor that transport.channel.make_server installs.
"""

import asyncio
import secrets
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health
from grpc_reflection.v1alpha import reflection

from baton.clock import Clock
from baton.errors import DeadlineExceededError, InvalidArgumentError
from baton.ids import RequestId
from baton.proto_types import event_to_proto, params_from_proto, timings_to_proto
from baton.results import ModelInfo
from baton.sampling_params import SamplingParams
from baton.types import TokenEvent
from baton.v1 import orchestrator_pb2 as pb
from baton.v1 import orchestrator_pb2_grpc, planning_pb2_grpc
from orchestrator import planning_service
from orchestrator.config import OrchestratorConfig
from orchestrator.controller import Controller, GenerateSpec
from orchestrator.intake import Intake
from orchestrator.lifecycle import Event, Finished, Started
from orchestrator.membership import Members
from orchestrator.planning_service import PlanningServicer
from planning.planner import ChainPlanner
from text.tokenizer import Tokenizer
from transport.channel import bind, make_server

Context = grpc.aio.ServicerContext[Any, Any]

SERVICE = pb.DESCRIPTOR.services_by_name["Orchestrator"].full_name
_MARGIN_S = 0.1
"""How much earlier than the client's own deadline a request ends, at most, so that its usage still arrives."""
_HEALTH_SERVICES = ("", SERVICE)
_HEALTH_REFRESH_S = 60.0
_STATUS_GRACE_S = 1.0
"""For the last status to leave, when nothing runs any more."""


class OrchestratorServicer(orchestrator_pb2_grpc.OrchestratorServicer):
    """Serves baton.v1.Orchestrator over a running controller."""

    def __init__(self, controller: Controller, intake: Intake, model: ModelInfo, clock: Clock) -> None:
        self._controller = controller
        self._intake = intake
        self._model = model
        self._clock = clock

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateEvent]:
        """Streams a request up to its one end: Finished, or the status of what failed; both at a deadline."""
        deadline_s = self._deadline_s(request, context)
        spec = await asyncio.to_thread(self._spec, request, deadline_s)
        async with aclosing(self._controller.generate(spec)) as events:
            async for event in events:
                error = event.error if isinstance(event, Finished) else None
                if error is None or isinstance(error, DeadlineExceededError):
                    yield self._event_to_proto(event)
                if error is not None:
                    raise error

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.Model:
        """The model's limits."""
        model = self._model
        return pb.Model(
            name=model.name,
            max_tokens=model.max_tokens,
            vocab_size=model.vocab_size,
            dtype=model.dtype,
            has_chat_template=model.has_chat_template,
            layout_fingerprint=model.layout_fingerprint,
        )

    async def GetClusterState(self, request: pb.GetClusterStateRequest, context: Context) -> pb.ClusterState:
        """Asks all workers what they hold, and answers within a second or so."""
        state = await self._controller.state()
        return pb.ClusterState(
            groups=[
                pb.GroupState(
                    name=group.name,
                    role=group.role,
                    endpoints=group.endpoints,
                    epoch=group.epoch,
                    is_ready=group.is_ready,
                    num_slots=group.num_slots,
                    num_free=group.num_free,
                    num_bytes_held=group.num_bytes_held,
                    num_leaked=group.num_leaked,
                    num_requests=group.num_requests,
                )
                for group in state.groups
            ],
            num_queued=state.num_queued,
            num_running=state.num_running,
            num_degraded=state.num_degraded,
            version=state.version,
        )

    def _deadline_s(self, request: pb.GenerateRequest, context: Context) -> float | None:
        """The earlier of the request's own deadline and, with a margin, the call's."""
        left_s = [request.deadline_ms / 1000] if request.deadline_ms else []
        if (call_s := context.time_remaining()) is not None:
            left_s.append(call_s - min(_MARGIN_S, 0.1 * call_s))
        return self._clock.now_s() + min(left_s) if left_s else None

    def _spec(self, request: pb.GenerateRequest, deadline_s: float | None) -> GenerateSpec:
        """The request, checked and tokenized."""
        intake = self._intake
        intake.check_names(request.request_id, request.model)
        if request.echo and request.HasField("chat"):
            raise InvalidArgumentError("echo with chat: an answer does not go on from a chat's text, leave it out")
        params = params_from_proto(request.sampling) if request.HasField("sampling") else SamplingParams()
        is_seeded = request.seeded or params.seed != 0
        outputs = tuple(tuple(output.token_ids) for output in request.outputs)
        intake.check_resumption(outputs, params, is_seeded)
        prompt_ids = self._prompt_ids(request)
        intake.check_sampling(params, len(prompt_ids))
        return GenerateSpec(
            request_id=RequestId(request.request_id or uuid.uuid4().hex),
            prompt_ids=prompt_ids,
            params=params if is_seeded else replace(params, seed=secrets.randbits(64)),
            outputs=outputs,
            ended=tuple(intake.end_of(output, params) for output in outputs),
            deadline_s=deadline_s,
            echo=self._prompt_text(request, prompt_ids) if request.echo else "",
        )

    def _prompt_ids(self, request: pb.GenerateRequest) -> tuple[int, ...]:
        match request.WhichOneof("input"):
            case "prompt":
                return self._intake.encode_text(request.prompt)
            case "chat":
                messages = [{"role": each.role, "content": each.content} for each in request.chat.messages]
                return self._intake.encode_chat(messages)
            case "token_ids":
                return self._intake.check_prompt_ids(request.token_ids.ids)
        raise InvalidArgumentError("input is not set: send prompt, chat or token_ids")

    def _prompt_text(self, request: pb.GenerateRequest, prompt_ids: tuple[int, ...]) -> str:
        return request.prompt.decode() if request.HasField("prompt") else self._intake.decode(prompt_ids)

    def _event_to_proto(self, event: Event) -> pb.GenerateEvent:
        match event:
            case Started():
                return pb.GenerateEvent(
                    started=pb.Started(
                        request_id=event.request_id,
                        seed=event.seed,
                        num_prompt_tokens=event.num_prompt_tokens,
                        model=self._model.name,
                        exact=True,
                    )
                )
            case TokenEvent():
                return pb.GenerateEvent(token=event_to_proto(event))
            case Finished():
                return pb.GenerateEvent(finished=_finished_to_proto(event))


class OrchestratorServer:
    """A controller, and the server that its service is on. Make one with `start`, on the loop."""

    def __init__(self, server: grpc.aio.Server, controller: Controller, port: int, health: asyncio.Task[None]) -> None:
        self.controller = controller
        self.port = port
        self._server = server
        self._health = health

    @classmethod
    async def start(
        cls,
        members: Members,
        tokenizer: Tokenizer,
        model: ModelInfo,
        *,
        clock: Clock,
        host: str,
        port: int = 0,
        eos_token_ids: Sequence[int] = (),
        config: OrchestratorConfig | None = None,
        planner: ChainPlanner,
        calibration_path: Path | None = None,
    ) -> Self:
        """Serves on host:port; port 0 takes any free one. `members` may know no group yet. Calibrations that `planner`
        is given are kept at `calibration_path`. Raises ConfigError when it cannot listen there."""
        server = make_server()
        bound = bind(server, host, port)
        controller = Controller(members, clock, config, planner=planner)
        servicer = OrchestratorServicer(controller, Intake(tokenizer, model, eos_token_ids), model, clock)
        orchestrator_pb2_grpc.add_OrchestratorServicer_to_server(servicer, server)
        planning_pb2_grpc.add_PlanningServicer_to_server(PlanningServicer(planner, calibration_path), server)
        shown = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(shown, server)
        health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        reflected = (SERVICE, planning_service.SERVICE, health_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(reflected, server)
        controller.start()
        await server.start()
        return cls(server, controller, bound, asyncio.create_task(_show_health(shown, members)))

    async def stop(self, grace_s: float = 0.0) -> None:
        """Takes no more requests, gives running ones `grace_s` seconds, then ends them everywhere, with UNAVAILABLE to
        their clients. Idempotent."""
        self._health.cancel()
        await asyncio.gather(self._health, return_exceptions=True)
        await self.controller.close(grace_s)
        await self._server.stop(_STATUS_GRACE_S)


async def _show_health(shown: health.HealthServicer, members: Members) -> None:
    """SERVING as long as a generation group is ready."""
    while True:
        ready = _is_ready(members)
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in _HEALTH_SERVICES:
            await shown.set(service, status)
        await members.until(partial(_turned, members, ready), _HEALTH_REFRESH_S)


def _is_ready(members: Members) -> bool:
    return any(group.ready for group in members.view.generation)


def _turned(members: Members, ready: bool) -> bool | None:
    return True if _is_ready(members) != ready else None


def _finished_to_proto(event: Finished) -> pb.Finished:
    usage = event.usage
    return pb.Finished(
        usage=pb.Usage(
            num_prompt_tokens=usage.num_prompt_tokens,
            num_output_tokens=usage.num_output_tokens,
            num_attempts=usage.num_attempts,
        ),
        timings=timings_to_proto(event.timings),
    )
