"""The relay in one process tree: an orchestrator's controller here, over workers that are this process's children."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from baton.clock import Clock
from deploy.groups.cluster import LocalCluster
from deploy.machine.calibrations import local_planner
from orchestrator.controller import Controller
from orchestrator.requests.config import OrchestratorConfig


@contextlib.asynccontextmanager
async def running_controller(cluster: LocalCluster, clock: Clock) -> AsyncIterator[Controller]:
    """A controller for the cluster, which is running; closed at the end, with all its requests."""
    local = cluster.config
    config = OrchestratorConfig(
        max_attempts=local.max_attempts, lease_ttl_s=local.lease_ttl_s, disaggregation=local.disaggregation
    )
    planner = await asyncio.to_thread(local_planner, local)
    controller = Controller(cluster.members, clock, config, planner=planner, on_failure=cluster.suspect)
    controller.start()
    try:
        yield controller
    finally:
        await controller.close()
