"""A cluster of child processes under the real supervision: workers of a real model, and an orchestrator that is killed
and replaced when it is silent."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from baton.results.completion import ModelInfo
from baton.settings.place import LOOPBACK
from deploy.config.file import make_local_config
from deploy.groups.cluster import LocalCluster
from deploy.groups.keeper import OrchestratorKeeper, OrchestratorPlan
from deploy.groups.processes import ProcessSpawner
from deploy.groups.surroundings import Heartbeat, Surroundings
from deploy.machine.calibrations import served_planner
from modeling.checkpoints.weights import load_config
from orchestrator.requests.config import OrchestratorConfig
from tests.support.clusters.spawners import orchestrator_worker
from tests.support.clusters.storms import CLOCK

DEAD_AFTER_S = 10.0
"""Twice the default of `supervision.dead_after_s`: a crowded machine may hold up a sound orchestrator for that long."""
LIMITS = OrchestratorConfig(disaggregation="always")


@asynccontextmanager
async def process_cluster(folder: Path, *, num_slots: int, max_tokens: int) -> AsyncIterator[OrchestratorKeeper]:
    """A chain of one rank and one generation group, each with one thread; the keeper of their orchestrator, which
    serves on `ports[0]` of this machine."""
    generate = {"num_threads": 1, "num_slots": num_slots, "max_slot_tokens": max_tokens}
    config = make_local_config({"model": {"dtype": "float32"}, "prefill": {"num_ranks": 1}, "generate": generate})
    supervision = config.supervision
    model = load_config(folder)

    async with LocalCluster(config, folder, CLOCK) as cluster:
        await cluster.until_ready(supervision.start_timeout_s)
        layout = cluster.members.view.generation[0].layout_fingerprint
        plan = OrchestratorPlan(
            orchestrator_worker(folder, LIMITS, cluster.secret),
            ModelInfo(folder.name, max_tokens, model.vocab_size, config.model.dtype, True, layout),
            model.eos_token_ids,
            partial(served_planner, config, folder),
            LOOPBACK,
        )
        heartbeat = Heartbeat(supervision.heartbeat_s, DEAD_AFTER_S)
        around = Surroundings(ProcessSpawner(supervision.start_timeout_s), heartbeat, CLOCK, lambda line: None)
        keeper = OrchestratorKeeper(plan, lambda: cluster.members.view, around)
        try:
            await keeper.start()
            yield keeper
        finally:
            await keeper.close()
