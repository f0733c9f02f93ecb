"""A cluster in one process tree: an orchestrator's orchestrator in this process, over workers that are its children."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from baton.process.clock import Clock
from deploy.groups.cluster import LocalCluster
from deploy.machine.calibrations import served_planner
from orchestrator.scheduler import RequestScheduler


@contextlib.asynccontextmanager
async def running_scheduler(cluster: LocalCluster, clock: Clock) -> AsyncIterator[RequestScheduler]:
    """Run a orchestrator over the running cluster until the end of the `with` block; then close it with all its
    requests."""
    config = cluster.config.orchestrator_config(cluster.folder)
    planner = await asyncio.to_thread(served_planner, cluster.config, cluster.folder)
    scheduler = RequestScheduler(
        cluster.members, clock, config, planner=planner, secret=cluster.secret, on_failure=cluster.suspect
    )
    scheduler.start()
    try:
        yield scheduler
    finally:
        await scheduler.close()
