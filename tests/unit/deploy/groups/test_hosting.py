"""A worker that was handed no secret does not start: it would serve every caller, or none."""

from dataclasses import replace

import pytest

from baton.errors import ConfigError
from deploy.config.worker import WorkerConfig
from deploy.groups.hosting import start_server
from tests.support.clusters.spawners import NONE, orchestrator_worker, tiny_worker

WORKERS = [tiny_worker("prefill"), tiny_worker("generate"), orchestrator_worker(NONE)]


@pytest.mark.parametrize("config", WORKERS, ids=lambda config: config.role)
async def test_a_worker_without_its_clusters_secret_is_refused_before_it_loads_anything(config: WorkerConfig) -> None:
    with pytest.raises(ConfigError, match="the cluster's secret is nothing: give the 64 hexadecimal digits"):
        await start_server(replace(config, place=replace(config.place, secret="")))
