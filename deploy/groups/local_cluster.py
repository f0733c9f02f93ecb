"""A cluster in one process tree: the orchestrator runs in this process, and its workers are child processes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from baton.process.clock import Clock
from deploy.groups.cluster import LocalCluster
from deploy.machine.calibrations import served_planner
from orchestrator.composition import build_orchestrator
from orchestrator.scheduler import RequestScheduler


@contextlib.asynccontextmanager
async def running_scheduler(cluster: LocalCluster, clock: Clock) -> AsyncIterator[RequestScheduler]:
    """Run an orchestrator that uses the running cluster until the end of the `with` block; then close it and all its
    requests."""
    config = cluster.plan.config.orchestrator_config(cluster.plan.model.folder)
    planner = await asyncio.to_thread(served_planner, cluster.plan)
    orchestrator = build_orchestrator(cluster.members, planner, clock, secret=cluster.secret, config=config)
    orchestrator.start()
    try:
        yield orchestrator.scheduler
    finally:
        await orchestrator.close()
