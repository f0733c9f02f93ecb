"""Supervises the orchestrator: sends it the state of the cluster, and replaces its process if it ends or does not
answer.

The state is sent as a ClusterView. Each view is also a heartbeat. The answer to it contains the operators' orders, for
example to drain or to add a group. A replacement of the orchestrator listens on the same ports, and starts with the
same orders. An unexpected exception is logged and reported; it ends neither the supervision nor the cluster. Works with
any Spawner. The orchestrator's side is in `orchestrator.api.host`. Runs on the supervisor's asyncio loop, in one task.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from baton.errors import BatonError, DeadlineExceededError, UnavailableError
from baton.planning.planner import ChainPlanner
from baton.process.backoff import Backoff
from baton.process.endless import repeat, tell_end
from baton.results.completion import ModelInfo
from baton.transport.channel import make_channel
from baton.transport.identity import ClusterSecret
from baton.transport.status_interceptor import translate_rpc_errors
from baton.v1 import keeping_pb2 as pb
from baton.v1.keeping_pb2_grpc import KeepingStub
from deploy.config.worker import WorkerConfig
from deploy.groups.failure_detector import FailureDetector
from deploy.groups.spawner import WorkerHandle
from deploy.groups.surroundings import Surroundings
from orchestrator.api.keeping import (
    model_to_proto,
    orders_from_proto,
    orders_to_proto,
    predictions_to_proto,
    view_to_proto,
)
from orchestrator.membership.view import ClusterView, Orders

if TYPE_CHECKING:
    from baton.v1.keeping_pb2_grpc import KeepingAsyncStub

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OrchestratorPlan:
    """Settings for starting the orchestrator and each of its replacements."""

    worker: WorkerConfig
    """Configuration of the orchestrator's process. It is the same for all replacements."""
    model: ModelInfo
    eos_token_ids: tuple[int, ...]
    make_planner: Callable[[], ChainPlanner]
    """Function that creates the planner. It is called once, and the planner is sent to every orchestrator process.
    Blocks."""
    host: str
    """Address of the interface on which the orchestrator serves clients."""
    ports: tuple[int, int | None] = (0, None)
    """Pair of the port for clients and the port for metrics. 0: any free port. The second is None if metrics are not
    served."""
    start_timeout_s: float = 60.0
    """Timeout in seconds. After its process has started, the orchestrator must serve clients within this time."""


class _Incarnation:
    """One process of the orchestrator, and the channel to it. For each replacement a new object is created."""

    def __init__(self, handle: WorkerHandle) -> None:
        self.handle = handle
        self._channel = make_channel(handle.endpoint, secret=ClusterSecret(handle.config.place.secret))
        self.stub: KeepingAsyncStub = KeepingStub(self._channel)

    async def kill(self) -> None:
        """Kill the process, and return when it has ended."""
        self.handle.kill()
        await self.handle.wait()

    async def close(self) -> None:
        """Close the channel and end the process."""
        await self._channel.close()
        await self.handle.close()


class OrchestratorKeeper:
    """Supervisor of the orchestrator's process: starts it, watches it, and replaces it. Owned by the cluster's
    supervisor. An object is used only once."""

    def __init__(self, plan: OrchestratorPlan, view: Callable[[], ClusterView], around: Surroundings) -> None:
        """Create a keeper without starting the orchestrator. `view` is called at each heartbeat, and returns the state
        of the cluster to send."""
        self.ports = plan.ports
        """Pair of the port for clients and the port for metrics. Before the start these are the planned ports, and
        afterwards the ports on which the orchestrator listens. The second is None if metrics are not served."""
        self.orders = Orders()
        """Operators' orders, as the orchestrator last reported them. A replacement of the orchestrator starts with
        these orders. The supervisor sets the initial orders, and makes every later change persistent."""
        self.follow: Callable[[Orders], Orders] = _keep
        """Function that stores and carries out the orders that a heartbeat's answer contains. Returns the orders that
        are now stored. Set once, by the supervisor."""
        self._plan = plan
        self._view = view
        self._around = around
        self._incarnation: _Incarnation | None = None
        self._predictions: pb.Predictions | None = None
        self._failure_detector = FailureDetector()
        self._news = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def pid(self) -> int:
        """Process id of the running orchestrator. 0 if no orchestrator runs."""
        return 0 if self._incarnation is None or self._incarnation.handle.ended else self._incarnation.handle.pid

    def tell(self) -> None:
        """Send the cluster's view to the orchestrator immediately instead of at the next heartbeat. Called when the
        view has changed."""
        self._news.set()

    async def start(self, process: WorkerHandle | None = None) -> None:
        """Start the orchestrator, or take over one that an earlier supervisor started. Return when it serves.
        Afterwards it is supervised, and is replaced when it ends. `process` is a process that already runs with the
        worker configuration of the plan; None: start a new process. If the orchestrator cannot serve, its process is
        ended, and the reason is raised as an error."""
        await self._begin(process)
        self._keeping = asyncio.create_task(self._keep())
        self._keeping.add_done_callback(self._tell_end)

    async def close(self) -> None:
        """End the supervision, then all requests, then the orchestrator's process. Idempotent."""
        self._closing = True
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        await self._end_incarnation()

    async def _keep(self) -> None:
        heartbeat = self._around.heartbeat
        pauses = Backoff(heartbeat.interval_s, heartbeat.dead_after_s)
        await repeat("the supervision of the orchestrator", self._turn, pauses, self._around.report)

    def _tell_end(self, keeping: "asyncio.Task[None]") -> None:
        if not self._closing:
            tell_end("the supervision of the orchestrator", self._around.report)(keeping)

    async def _turn(self) -> None:
        """Wait for the next heartbeat or a change of the view, then send the view. Replace an orchestrator that has
        ended, or that has not answered for more than `dead_after_s` seconds."""
        with contextlib.suppress(TimeoutError):  # no news: the regular heartbeat is due
            async with asyncio.timeout(self._around.heartbeat.interval_s):  # wait_for may swallow a cancellation
                await self._news.wait()
        self._news.clear()
        incarnation = self._incarnation
        if incarnation is None or incarnation.handle.ended:
            await self._replace()
            return
        heartbeat, asked_s = self._around.heartbeat, self._around.clock.now_s()
        try:
            status = await self._push(incarnation, heartbeat.interval_s)
        except grpc.aio.AioRpcError as error:
            silent_s = self._failure_detector.go_on(asked_s, self._around.clock.now_s(), heartbeat.interval_s)
            if silent_s > heartbeat.dead_after_s:
                logger.warning("the orchestrator has been silent for %.1f s (%s): killing it", silent_s, error.code())
                await incarnation.kill()
                await self._replace()
        else:
            self._failure_detector.end()
            self.orders = self.follow(orders_from_proto(status.orders))
            if status.is_superseded:
                logger.warning("workers refuse the orchestrator, because they have seen a higher term: killing it")
                await incarnation.kill()
                await self._replace()

    async def _push(self, incarnation: _Incarnation, timeout_s: float) -> pb.OrchestratorStatus:
        """Send one heartbeat, with the view."""
        request = pb.UpdateRequest(view=view_to_proto(self._view()), kept=orders_to_proto(self.orders))
        return await incarnation.stub.Update(request, timeout=timeout_s)

    async def _replace(self) -> None:
        logger.warning("the orchestrator has ended: replacing it")
        try:
            await self._end_incarnation()
            await self._begin()
        except BatonError as refused:
            logger.warning("the orchestrator failed to start (%s); retrying in one heartbeat", refused)

    async def _begin(self, process: WorkerHandle | None = None) -> None:
        incarnation = _Incarnation(process or await self._around.spawner.start(self._plan.worker))
        try:
            status = await self._serve(incarnation)
        except BaseException:
            await incarnation.kill()
            await incarnation.close()
            raise
        self._incarnation = incarnation
        self.ports = (status.port, status.metrics_port if status.HasField("metrics_port") else None)
        self._failure_detector.end()

    async def _serve(self, incarnation: _Incarnation) -> pb.OrchestratorStatus:
        """Make the orchestrator serve clients, unless it already does. Raises its error if it cannot serve."""
        timeout_s = self._plan.start_timeout_s
        try:
            with translate_rpc_errors():
                status = await self._push(incarnation, timeout_s)
                return status if status.port else await incarnation.stub.Serve(await self._request(), timeout=timeout_s)
        except DeadlineExceededError as error:
            raise UnavailableError(f"the orchestrator did not start within {timeout_s:g} s: see its output") from error

    async def _request(self) -> pb.ServeRequest:
        plan, (port, metrics_port) = self._plan, self.ports
        if self._predictions is None:
            self._predictions = predictions_to_proto(await asyncio.to_thread(plan.make_planner))
        return pb.ServeRequest(
            model=model_to_proto(plan.model),
            eos_token_ids=plan.eos_token_ids,
            host=plan.host,
            port=port,
            metrics_port=metrics_port,
            predictions=self._predictions,
            term=await asyncio.to_thread(self._around.terms.claim),
        )

    async def _end_incarnation(self) -> None:
        if self._incarnation is not None:
            await self._incarnation.close()
        self._incarnation = None


def _keep(orders: Orders) -> Orders:
    return orders
