"""What a worker is told is what its cluster was configured with, in whatever process it runs."""

import math
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from baton.settings.base import from_json, to_json
from baton.settings.place import WorkerPlace
from baton.types import KernelChoice
from deploy.config.file import WrittenConfig
from deploy.config.worker import WorkerConfig
from generate_workers.config import EngineConfig, EvictionName
from generate_workers.residency.sparse.pool import Eviction
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.requests.tenants import hash_key
from tests.support.wire.secret import SECRET

PLACE = WorkerPlace(model_folder=Path("model"), secret=SECRET.text)


@pytest.mark.parametrize("role", ["prefill", "generate"])
def test_a_workers_settings_survive_json(role: str) -> None:
    cluster = WrittenConfig({"prefill": {"cores": [[0], [1, 2]]}, "generate": {"step_budget_s": math.inf}}).config
    worker = cluster.workers(f"{role}-0", PLACE)[0]
    assert from_json(WorkerConfig, to_json(worker)) == worker
    assert "\n" not in to_json(worker)
    chosen = replace(worker, place=replace(worker.place, kernels=(KernelChoice("p", "a", "b", None),)))
    assert from_json(WorkerConfig, to_json(chosen)) == chosen


def test_an_orchestrators_settings_survive_json() -> None:
    tenants = {"acme": {"weight": 2.5, "api_keys": [f"sha256:{hash_key('k')}"]}}
    section = WrittenConfig({"orchestrator": {"tenants": tenants}}).config.orchestrator_config(Path("/models/one"))
    config = WorkerConfig(
        "orchestrator", 0, 0, WorkerPlace(model_folder=Path("/models/one"), secret=SECRET.text), section
    )
    read = from_json(WorkerConfig, to_json(config))
    assert read == config and isinstance(read.section, OrchestratorConfig)
    assert read.section.tenants.of((("x-api-key", "k"),)).name == "acme"


def test_workers_of_one_cluster_share_their_node_s_prefixes_and_no_others() -> None:
    prefill = {"num_groups": 2, "prefix_share": 0.25, "prefix_disk_bytes": "2GiB"}
    cluster = WrittenConfig({"name": "c", "prefill": prefill, "model": {"cache": "/disk"}}).config
    workers = [worker for name in cluster.group_sizes for worker in cluster.workers(name, PLACE)]
    assert len(workers) == 5
    places = [worker.place for worker in workers]
    assert {(place.cluster, place.prefix_share) for place in places} == {("c", 0.25)}
    assert {(place.prefix_disk, place.prefix_disk_bytes) for place in places} == {("/disk", 2 << 30)}


def test_engines_of_one_cluster_share_a_machine_s_memory() -> None:
    cluster = WrittenConfig({"generate": {"num_groups": 3}}).config
    assert cluster.workers("generate-2", PLACE)[0].place.num_engines == 3


def test_the_ways_to_evict_are_the_pools() -> None:
    assert tuple(each.value for each in Eviction) == get_args(EvictionName)


def test_an_engine_is_told_its_pool() -> None:
    generate = {"residency": "infinigen", "pool_tokens": 500, "pool_eviction": "lru"}
    worker = WrittenConfig({"generate": generate}).config.workers("generate-0", PLACE)[0]
    assert isinstance(worker.section, EngineConfig)
    assert (worker.section.pool_tokens, worker.section.pool_eviction) == (500, "lru")
