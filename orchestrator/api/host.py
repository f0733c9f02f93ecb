"""Hosts the orchestrator and serves baton.v1.Keeping. Through this service, the supervisor reports the groups of the
cluster, and starts the service for clients.

The client of Keeping is `deploy.groups.keeper`. `deploy.groups.hosting` makes the host, in a child process or a Ray
actor. Keeping has a separate port, because its data decides to which workers prompts are sent. Starts
`orchestrator.api.frontend`. Runs on the process's event loop.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import grpc

from baton.errors import BatonError
from baton.process.clock import SystemClock
from baton.process.cores import pin
from baton.process.garbage import collect_rarely
from baton.process.tracing import provider_of
from baton.proto_types import model_from_proto
from baton.text.tokenizer import Tokenizer
from baton.transport.channel import bind, make_server
from baton.transport.identity import ClusterSecret
from baton.v1 import keeping_pb2 as pb
from baton.v1 import keeping_pb2_grpc
from orchestrator.api.checks import RequestValidator
from orchestrator.api.frontend import OrchestratorServer
from orchestrator.api.keeping import orders_from_proto, orders_to_proto, planner_from_proto, view_from_proto
from orchestrator.composition import build_orchestrator
from orchestrator.membership.members import Membership
from orchestrator.observability.traces import Traces
from orchestrator.requests.config import OrchestratorConfig

Context = grpc.aio.ServicerContext[Any, Any]


class OrchestratorHost(keeping_pb2_grpc.KeepingServicer):
    """One run of the orchestrator, which the supervisor controls through gRPC methods."""

    def __init__(
        self, folder: Path, config: OrchestratorConfig, *, host: str, secret: ClusterSecret, cores: Sequence[int] = ()
    ) -> None:
        """Prepare a run of the orchestrator, without serving yet.

        `folder` contains the tokenizer and its chat template. They are used even if the supervisor sends a different
        model. The gRPC service for the supervisor listens at the address `host`. The supervisor must have the cluster's
        secret. The process is pinned to the CPU cores `cores`; empty: it is not pinned.
        """
        self.port = 0
        """Port of the gRPC service for the supervisor; 0 before the host has started."""
        self._folder = folder
        self._config = config
        self._host = host
        self._secret = secret
        self._cores = cores
        self._members = Membership()
        self._keeping = make_server(check=secret.check)
        self._tokenizer: Tokenizer | None = None
        """Tokenizer of the model; None before the host has started."""
        self._server: OrchestratorServer | None = None
        self._lock = asyncio.Lock()
        self._starting: asyncio.Task[None] | None = None

    async def start(self) -> Self:
        """Load the tokenizer, then start the gRPC service for the supervisor on any free port. Raises ModelError if the
        tokenizer cannot be loaded, and ConfigError if the host cannot listen on the port."""
        pin(self._cores)
        self._tokenizer = await asyncio.to_thread(
            Tokenizer.load, self._folder, control_tokens_in_text=self._config.control_tokens_in_text
        )
        self.port = bind(self._keeping, self._host)
        keeping_pb2_grpc.add_KeepingServicer_to_server(self, self._keeping)
        await self._keeping.start()
        return self

    async def stop(self, grace_s: float = 0.0) -> None:
        """End all requests, and stop the servers. A server that is still starting is stopped as well. Running requests
        have `grace_s` seconds to end."""
        await self._keeping.stop(grace_s)
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(grace_s)

    async def Update(self, request: pb.UpdateRequest, context: Context) -> pb.OrchestratorStatus:
        """Replace the cluster view, and record which orders for groups (such as drains) the supervisor has stored.
        Until the service for clients has started, these orders also replace the orders in force. Return the status,
        which includes the orders in force."""
        self._members.update(view_from_proto(request.view))
        kept = orders_from_proto(request.kept)
        if self._server is None:
            self._members.keep_orders(kept)
        self._members.hear_kept(kept)
        return self._status()

    async def Serve(self, request: pb.ServeRequest, context: Context) -> pb.OrchestratorStatus:
        """Start to serve clients. Only the first call has an effect. If the call is cancelled, the start continues
        until it is complete.

        Raises ConfigError if the server cannot listen on its port.
        """
        self._starting = asyncio.create_task(self._start(request))
        await asyncio.shield(self._starting)
        return self._status()

    async def _start(self, request: pb.ServeRequest) -> None:
        async with self._lock:
            if self._server is None:
                self._server = await self._serve(request)
                collect_rarely()

    async def _serve(self, request: pb.ServeRequest) -> OrchestratorServer:
        tokenizer = self._tokenizer
        assert tokenizer is not None, "the host has not started"
        model = replace(model_from_proto(request.model), has_chat_template=tokenizer.has_chat_template)
        planner = planner_from_proto(request.predictions)
        traces = Traces(provider_of(self._config, {"baton.model": model.name}))
        orchestrator = build_orchestrator(
            self._members,
            planner,
            SystemClock(),
            secret=self._secret,
            config=self._config,
            traces=traces,
            term=request.term,
        )
        try:
            return await OrchestratorServer.start(
                orchestrator,
                RequestValidator(tokenizer, model, tuple(request.eos_token_ids)),
                (request.host, request.port),
                metrics_port=request.metrics_port if request.HasField("metrics_port") else None,
            )
        except BatonError:
            await orchestrator.close()
            raise

    def _status(self) -> pb.OrchestratorStatus:
        server = self._server
        return pb.OrchestratorStatus(
            orders=orders_to_proto(self._members.orders),
            port=0 if server is None else server.port,
            metrics_port=None if server is None else server.metrics_port,
            is_superseded=server is not None and server.orchestrator.poller.is_superseded,
        )
