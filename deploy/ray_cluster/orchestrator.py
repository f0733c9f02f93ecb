"""Keeps the orchestrator's actor alive and informed: pushes the cluster's view, replaces it when it ends or is silent.

A push is the heartbeat. The replacement listens on the same port. An exception that was not foreseen is logged and
reported, and ends neither the keeper nor the cluster. Runs on the supervisor's loop, in one task.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from baton.clock import Clock
from baton.endless import Pauses, Report, repeat
from baton.errors import BatonError, ConfigError, UnavailableError
from baton.results import ModelInfo
from deploy.config.cluster import ClusterConfig
from deploy.groups.group import Heartbeat
from deploy.machine.calibrations import calibration_path, served_planner
from deploy.ray_cluster.spawner import SMALL_CPU, answer, kill_process
from orchestrator.api.host import OrchestratorHost
from orchestrator.membership.members import ClusterView, Orders
from planning.planner import ChainPlanner

logger = logging.getLogger(__name__)

_NAME = "orchestrator"
_MAX_CALLS = 16


@dataclass(frozen=True)
class OrchestratorPlan:
    """What a new life of the orchestrator is made from."""

    config: ClusterConfig
    folder: Path
    """Folder of the resolved model."""
    model: ModelInfo
    eos_token_ids: tuple[int, ...]


class OrchestratorKeeper:
    """Owns the orchestrator's actor. Used by the supervisor."""

    def __init__(
        self,
        plan: OrchestratorPlan,
        view: Callable[[], ClusterView],
        heartbeat: Heartbeat,
        clock: Clock,
        *,
        report: Report | None = None,
    ) -> None:
        """Make a keeper that has no actor yet. `report` takes a line for the user about a failure that was not
        foreseen."""
        section = plan.config.orchestrator
        self.ports = (section.port, None if section.metrics_port < 0 else section.metrics_port)
        """Ports for clients and for metrics (None: no metrics): as configured, and once started, those that the
        orchestrator got."""
        self.orders = Orders()
        """Operators' orders, as the orchestrator's last life knew them, for its next life. First set by the supervisor,
        which keeps them too."""
        self.follow: Callable[[Orders], Orders] = _keep
        """Called with the orders in each heartbeat's answer; returns those that were kept. Set once, by the
        supervisor."""
        self._plan = plan
        self._view = view
        self._heartbeat = heartbeat
        self._clock = clock
        self._node_id = ray.get_runtime_context().get_node_id()
        self._actor: ActorHandle[Any] | None = None
        self._planner: ChainPlanner | None = None
        self._pid = 0
        self._last_seen_s = 0.0
        """When the actor last answered, or was replaced, on the clock."""
        self._news = asyncio.Event()
        self._report = report

    def tell(self) -> None:
        """Push the changed view now, without waiting for the next heartbeat."""
        self._news.set()

    async def start(self) -> None:
        """Find the actor that an earlier supervisor left, or make one; return when it serves. Raises its error when it
        cannot serve."""
        self._actor = _find(self._plan.config.name) or self._make(await self._plan_chains())
        host, timeout_s = self._plan.config.orchestrator.host, self._plan.config.supervision.start_timeout_s
        try:
            serving = answer(self._actor.serve.remote(self._view(), host, *self.ports, self.orders))
            self._pid, *ports = await asyncio.wait_for(serving, timeout_s)
            self.ports = (ports[0], ports[1])
        except RayTaskError as error:
            reason = error.cause
            raise reason if isinstance(reason, BatonError) else UnavailableError(f"orchestrator: {reason}") from error
        except (RayError, TimeoutError) as error:
            ray.kill(self._actor)
            raise UnavailableError(
                f"the orchestrator did not start ({type(error).__name__}): see Ray's logs"
            ) from error

    async def keep(self) -> None:
        """Push views, and replace the actor when it has ended, until this task is cancelled."""
        self._last_seen_s = self._clock.now_s()
        pauses = Pauses(self._heartbeat.interval_s, self._heartbeat.dead_after_s)
        await repeat("the supervision of the orchestrator", self._turn, pauses, self._report)

    async def _turn(self) -> None:
        """Push the view when a heartbeat is due or it has changed; kill an actor that has been silent for too long, and
        replace one that has ended."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), self._heartbeat.interval_s)
        self._news.clear()
        try:
            orders = await self._push()
        except TimeoutError:
            if self._clock.now_s() - self._last_seen_s > self._heartbeat.dead_after_s:
                logger.warning("the orchestrator is silent: killing it")
                kill_process(self._pid, self._node_id)
        except RayError as error:
            logger.warning("the orchestrator ended (%s): replacing it", type(error).__name__)
            await self._replace()
        else:
            self.orders = self.follow(orders)

    async def _push(self) -> Orders:
        """Send one heartbeat, with the view, to the actor; return the orders in force."""
        assert self._actor is not None
        updating = answer(self._actor.update.remote(self._view(), self.orders))
        orders: Orders = await asyncio.wait_for(updating, self._heartbeat.interval_s)
        self._last_seen_s = self._clock.now_s()
        return orders

    async def _replace(self) -> None:
        try:
            await self.start()
        except BatonError as refused:
            logger.warning("the orchestrator did not start (%s): another try in a heartbeat", refused)
        finally:
            self._last_seen_s = self._clock.now_s()

    async def close(self) -> None:
        """End the requests, the server and the process. Idempotent."""
        if self._actor is None:
            return
        try:
            await asyncio.wait_for(answer(self._actor.stop.remote()), self._heartbeat.dead_after_s)
        except TimeoutError:
            kill_process(self._pid, self._node_id)  # the process is stopped, and Ray's own kill would not reach it
        except RayError:
            logger.info("the orchestrator had ended already")
        ray.kill(self._actor)
        self._actor = None

    async def _plan_chains(self) -> ChainPlanner:
        """Return a planner by the calibration that is kept now, which an earlier life may have been given; if it is
        unchanged, the former planner is used again. A file that has been damaged since does not end a cluster that
        serves."""
        plan = self._plan
        try:
            self._planner = await asyncio.to_thread(served_planner, plan.config, plan.folder, self._planner)
        except ConfigError as error:
            if self._planner is None:
                raise
            logger.warning("the former calibration stays in force: %s", error)
        return self._planner

    def _make(self, planner: ChainPlanner) -> "ActorHandle[Any]":
        plan = self._plan
        made: Any = ray.remote(OrchestratorHost).options(
            name=_NAME,
            namespace=plan.config.name,
            lifetime="detached",
            num_cpus=SMALL_CPU,
            max_restarts=0,
            max_concurrency=_MAX_CALLS,
            scheduling_strategy=ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
                self._node_id, soft=False
            ),
        )
        try:
            actor: ActorHandle[Any] = made.remote(
                plan.folder,
                plan.model,
                plan.eos_token_ids,
                plan.config.orchestrator_config(plan.folder),
                planner=planner,
                calibration_path=calibration_path(planner.calibration, plan.config.prefill.calibration),
                cores=plan.config.orchestrator.cores,
            )
        except ValueError as error:  # the name still belongs to an actor that is about to end
            raise UnavailableError("the orchestrator's former life has not ended yet; trying again") from error
        return actor


async def end_orchestrator(namespace: str, within_s: float) -> None:
    """End the orchestrator's actor that an earlier supervisor left and no keeper has found. Harmless when there is
    none."""
    actor = _find(namespace)
    if actor is None:
        return
    with contextlib.suppress(RayError, TimeoutError):  # the actor is killed next, whatever it answers
        await asyncio.wait_for(answer(actor.stop.remote()), within_s)
    ray.kill(actor)


def _find(namespace: str) -> "ActorHandle[Any] | None":
    try:
        actor: ActorHandle[Any] = ray.get_actor(_NAME, namespace=namespace)
    except ValueError:
        return None
    return actor


def _keep(orders: Orders) -> Orders:
    return orders
