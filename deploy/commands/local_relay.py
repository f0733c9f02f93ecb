"""A relay in one process tree: an orchestrator's controller in this process, over workers that are its children."""

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
    """Run a controller over the running cluster until the end of the `with` block; then close it with all its
    requests."""
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
