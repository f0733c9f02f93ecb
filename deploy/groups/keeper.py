"""Supervises the orchestrator: sends it the cluster's view, and replaces its process if it ends or does not answer.

Each view that is sent is also a heartbeat; its answer contains the operators' orders. A replacement listens on the same
ports, and takes over the orders. An unexpected exception is logged and reported, and ends neither the keeper nor the
cluster. Works over any Spawner; the other half is `orchestrator.api.host`. Runs on the supervisor's loop, in one task.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from baton.errors import BatonError, ConfigError, DeadlineExceededError, UnavailableError
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
    """Settings with which the orchestrator and each of its replacements are started."""

    worker: WorkerConfig
    """Configuration of the orchestrator's process, equal for all replacements."""
    model: ModelInfo
    eos_token_ids: tuple[int, ...]
    make_planner: Callable[[ChainPlanner | None], ChainPlanner]
    """Returns the planner of a new orchestrator process, from the planner of the former one (None: it is the first).
    Blocks; raises ConfigError for a damaged calibration."""
    host: str
    """Interface on which clients are served."""
    ports: tuple[int, int | None] = (0, None)
    """Ports for clients and for metrics; 0: any free one, None: no metrics."""
    calibration_path: Path | None = None
    """File for calibrations that the orchestrator receives while it runs; None: they are not kept."""
    start_timeout_s: float = 60.0
    """Timeout in seconds for the orchestrator to serve clients after its process has started."""


class _Incarnation:
    """One process of the orchestrator, with the channel to it. A replacement is another _Incarnation."""

    def __init__(self, handle: WorkerHandle) -> None:
        self.handle = handle
        self._channel = make_channel(handle.endpoint, secret=ClusterSecret(handle.config.place.secret))
        self.stub: KeepingAsyncStub = KeepingStub(self._channel)

    async def kill(self) -> None:
        """Kill the process; return when it has ended."""
        self.handle.kill()
        await self.handle.wait()

    async def close(self) -> None:
        """Close the channel and end the process."""
        await self._channel.close()
        await self.handle.close()


class OrchestratorKeeper:
    """Owns the orchestrator. Used by the cluster's supervisor, once."""

    def __init__(self, plan: OrchestratorPlan, view: Callable[[], ClusterView], around: Surroundings) -> None:
        """Make a keeper that has no orchestrator yet. `view` is called at each heartbeat."""
        self.ports = plan.ports
        """Ports for clients and for metrics (None: no metrics): the planned ones, and after the start those that the
        orchestrator listens on."""
        self.orders = Orders()
        """Operators' orders as the orchestrator last reported them; a replacement process starts with them. First set
        by the supervisor, which keeps them too."""
        self.follow: Callable[[Orders], Orders] = _keep
        """Called with the orders in each heartbeat's answer; returns those that were kept. Set once, by the
        supervisor."""
        self._plan = plan
        self._view = view
        self._around = around
        self._incarnation: _Incarnation | None = None
        self._planner: ChainPlanner | None = None
        self._failure_detector = FailureDetector()
        self._news = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def pid(self) -> int:
        """Process id of the running orchestrator; 0 when none runs."""
        return 0 if self._incarnation is None or self._incarnation.handle.ended else self._incarnation.handle.pid

    def tell(self) -> None:
        """Send the changed view immediately instead of at the next heartbeat."""
        self._news.set()

    async def start(self, process: WorkerHandle | None = None) -> None:
        """Start the orchestrator, or take over an orchestrator that an earlier supervisor started. Return when it
        serves; after that it is supervised, and replaced when it ends. `process`, if not None, is a process that was
        already started with the plan's worker configuration. If the orchestrator cannot serve, end its process and
        raise its error."""
        await self._begin(process)
        self._keeping = asyncio.create_task(self._keep())
        self._keeping.add_done_callback(self._tell_end)

    async def close(self) -> None:
        """End the supervision, then all requests and the process. Idempotent."""
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
        ended, or has not answered for too long."""
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
        return pb.ServeRequest(
            model=model_to_proto(plan.model),
            eos_token_ids=plan.eos_token_ids,
            host=plan.host,
            port=port,
            metrics_port=metrics_port,
            predictions=predictions_to_proto(await self._plan_chains(), plan.calibration_path),
        )

    async def _plan_chains(self) -> ChainPlanner:
        """Return a planner that uses the current calibration file, which an earlier orchestrator process may have
        replaced. If the file has been damaged since the cluster started to serve, the cluster keeps serving."""
        try:
            self._planner = await asyncio.to_thread(self._plan.make_planner, self._planner)
        except ConfigError as error:
            if self._planner is None:
                raise
            logger.warning("the former calibration stays in force: %s", error)
        return self._planner

    async def _end_incarnation(self) -> None:
        if self._incarnation is not None:
            await self._incarnation.close()
        self._incarnation = None


def _keep(orders: Orders) -> Orders:
    return orders
