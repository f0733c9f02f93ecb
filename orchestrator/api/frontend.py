"""Serves the orchestrator over gRPC: checks the clients' requests, and sends the scheduler's events to the clients.

`orchestrator.api.access` checks each call first. `orchestrator.api.admin` is served on the same port. Runs on the
process's event loop. Long prompts are tokenized in threads. The interceptor that `baton.transport.channel.make_server`
installs converts errors to gRPC statuses, with RetryInfo.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health
from grpc_reflection.v1alpha import reflection

from baton.calls.cluster_state import cluster_state_to_proto
from baton.calls.requests import BY_CHAIN
from baton.errors import DeadlineExceededError
from baton.process.backoff import Backoff
from baton.process.endless import repeat
from baton.proto_types import event_to_proto, requests_to_proto, timings_to_proto
from baton.text.form_prover import FormProver
from baton.transport.channel import bind, make_server
from baton.types import TokenEvent
from baton.v1 import admin_pb2_grpc, orchestrator_pb2_grpc
from baton.v1 import orchestrator_pb2 as pb
from orchestrator.api import admin as admin_service
from orchestrator.api.access import check_access
from orchestrator.api.admin import AdminServicer
from orchestrator.api.checks import RequestValidator
from orchestrator.api.delivery import deliver
from orchestrator.api.request_reader import RequestReader, deadline_s
from orchestrator.composition import Orchestrator
from orchestrator.observability.metrics_server import MetricsServer
from orchestrator.observability.state import Overview
from orchestrator.requests.record import Event, Finished, Started
from orchestrator.requests.request import Request

Context = grpc.aio.ServicerContext[Any, Any]

SERVICE = pb.DESCRIPTOR.services_by_name["Orchestrator"].full_name
_HEALTH_SERVICES = ("", SERVICE)
_TRACE_CONTEXT = ("traceparent", "tracestate")
"""Metadata keys of the caller's trace context, as defined by the W3C."""
_HEALTH_POLL_S = 0.25
"""Number of seconds between two updates of the published health."""
_HEALTH_PAUSES = Backoff(_HEALTH_POLL_S, 5.0)
_STATUS_GRACE_S = 1.0
"""Maximum time in seconds that a stopping server waits, after all requests have ended, for the last statuses to be
sent."""


class OrchestratorServicer(orchestrator_pb2_grpc.OrchestratorServicer):
    """Serves baton.v1.Orchestrator for a running orchestrator."""

    def __init__(
        self, orchestrator: Orchestrator, validator: RequestValidator, prover: FormProver, metrics_endpoint: str = ""
    ) -> None:
        """`prover` checks whether structured outputs can be compiled. `metrics_endpoint` is the address (host:port) of
        the metrics; empty if metrics are not served."""
        self.orchestrator = orchestrator
        self._prover = prover
        self._validator = validator
        self._reader = RequestReader(validator)
        self._clock = orchestrator.clock
        self._tenants = orchestrator.config.tenants
        self._metrics_endpoint = metrics_endpoint

    async def Generate(  # type: ignore[override]  # writes to the context, which gRPC permits
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        """Serve one request, and stream its events. The stream ends with the event Finished or with an error status. If
        the deadline has passed, it ends with both."""
        end_s = deadline_s(request, context, self._clock)
        left_s = None if end_s is None else end_s - self._clock.now_s()
        async with aclosing(self._messages(request, context, end_s)) as messages:
            await deliver(context, messages, left_s)

    async def _messages(
        self, request: pb.GenerateRequest, context: Context, end_s: float | None
    ) -> AsyncGenerator[pb.GenerateEvent, None]:
        metadata = context.invocation_metadata() or ()
        read = partial(
            self._reader.read,
            request,
            tenant=self._tenants.of(metadata),
            end_s=end_s,
            by_chain=BY_CHAIN in metadata,
            trace_context=tuple((key, str(value)) for key, value in metadata if key in _TRACE_CONTEXT),
        )
        asked = await self._proven(await self._reader.off_the_loop(request, read))
        async with aclosing(self.orchestrator.scheduler.generate(asked)) as events:
            async for event in events:
                error = event.error if isinstance(event, Finished) else None
                if error is None or isinstance(error, DeadlineExceededError):
                    yield self._event_to_proto(event)
                if error is not None:
                    raise error

    async def _proven(self, asked: Request) -> Request:
        """Return the request with its structured output compiled, if it has any. Raises the errors of
        `FormProver.prove`."""
        params = asked.params
        if params.structured_output is None:
            return asked
        form = await self._prover.prove(params.structured_output, asked.outputs, asked.tenant.name)
        return replace(asked, params=replace(params, structured_output=form))

    async def close(self) -> None:
        """Stop the child processes that check whether structured outputs can be compiled."""
        await self._prover.close()

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.Model:
        """Return the name, the limits and the fingerprints of the served model."""
        return pb.Model(**vars(self._validator.model), tokenizer_fingerprint=self._validator.tokenizer.fingerprint)

    async def GetClusterState(self, request: pb.GetClusterStateRequest, context: Context) -> pb.ClusterState:
        """Poll all workers, and return the state of the cluster. Takes about a second at most."""
        state = await self.orchestrator.overview.state()
        return cluster_state_to_proto(replace(state, metrics_endpoint=self._metrics_endpoint))

    async def GetRequests(self, request: pb.GetRequestsRequest, context: Context) -> pb.RequestList:
        """Return all unfinished requests, and the requests that ended last. Request ids are included only for the
        caller's own requests."""
        viewer = self._tenants.viewer_of(context.invocation_metadata() or ())
        return requests_to_proto(self.orchestrator.journal.book.list(request.num_ended, viewer))

    def _event_to_proto(self, event: Event) -> pb.GenerateEvent:
        match event:
            case Started():
                return pb.GenerateEvent(started=pb.Started(**vars(event), model=self._validator.model.name))
            case TokenEvent():
                return pb.GenerateEvent(token=event_to_proto(event))
            case Finished():
                usage, timings = pb.Usage(**vars(event.usage)), timings_to_proto(event.timings)
                return pb.GenerateEvent(finished=pb.Finished(usage=usage, timings=timings))


class OrchestratorServer:
    """Orchestrator together with the gRPC server of its services. Made with `start`, on the asyncio loop."""

    def __init__(
        self,
        server: grpc.aio.Server,
        servicer: OrchestratorServicer,
        port: int,
        health: asyncio.Task[None],
        metrics: MetricsServer | None,
    ) -> None:
        self.orchestrator = servicer.orchestrator
        self.port = port
        self._server = server
        self._servicer = servicer
        self._health = health
        self._metrics = metrics

    @property
    def metrics_port(self) -> int | None:
        """Return the port on which metrics are served; None if metrics are not served."""
        return None if self._metrics is None else self._metrics.port

    @classmethod
    async def start(
        cls,
        orchestrator: Orchestrator,
        validator: RequestValidator,
        address: tuple[str, int],
        *,
        metrics_port: int | None = None,
    ) -> Self:
        """Start the orchestrator and serve it at `address`, which is (host, port). If `metrics_port` is given, serve
        metrics on this port of the same host. A port of 0 selects any free port.

        `validator` checks requests against the served model. Raises ConfigError if a server cannot listen on its port.
        """
        (host, port), config, overview = address, orchestrator.config, orchestrator.overview
        server = make_server(check=partial(check_access, config.tenants, orchestrator.secret))
        bound = bind(server, host, port)
        metrics = None
        if metrics_port is not None:
            registry = orchestrator.journal.metrics.registry
            metrics = await MetricsServer.start(registry, overview.last_state, host=host, port=metrics_port)
        prover = FormProver(validator.tokenizer.to_json, validator.eos_token_ids)
        endpoint = "" if metrics is None else metrics.endpoint
        servicer = OrchestratorServicer(orchestrator, validator, prover, endpoint)
        orchestrator_pb2_grpc.add_OrchestratorServicer_to_server(servicer, server)
        admin = AdminServicer(orchestrator.operations, orchestrator.journal.traces, config.model_folders)
        admin_pb2_grpc.add_AdminServicer_to_server(admin, server)
        shown = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(shown, server)
        health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        reflected = (SERVICE, admin_service.SERVICE, health_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(reflected, server)
        orchestrator.start()
        await server.start()
        telling = asyncio.create_task(_show_health(shown, overview))
        return cls(server, servicer, bound, telling, metrics)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuse new requests, and wait at most `grace_s` seconds for running requests. End the remaining ones with
        UNAVAILABLE. Idempotent."""
        self._health.cancel()
        await asyncio.gather(self._health, return_exceptions=True)
        await self.orchestrator.close(grace_s)
        await self._server.stop(_STATUS_GRACE_S)
        await self._servicer.close()
        if self._metrics is not None:
            await self._metrics.stop()


async def _show_health(shown: health.HealthServicer, overview: Overview) -> None:
    """Publish the result of `Overview.is_serving` as the server's health, until cancelled."""
    told: bool | None = None

    async def look() -> None:
        nonlocal told
        if (serving := overview.is_serving()) is not told:
            status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
            for service in _HEALTH_SERVICES:
                await shown.set(service, status)
            told = serving
        await asyncio.sleep(_HEALTH_POLL_S)

    await repeat("the watch on health", look, _HEALTH_PAUSES)
