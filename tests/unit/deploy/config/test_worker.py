"""The local relay's configuration refuses what cannot work, by name."""

from pathlib import Path
from typing import Any

import pytest

from baton.errors import ConfigError
from deploy.config.cluster import ClusterConfig
from deploy.config.worker import EVICTIONS, LocalConfig, WorkerConfig
from generate_workers.engine.core import EngineConfig
from generate_workers.residency.sparse.pool import Eviction


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_ranks", -1),
        ("num_ranks", 65),
        ("dtype", "float8"),
        ("quantization", "int4"),
        ("num_slots", 0),
        ("generate_threads", -1),
        ("heartbeat_s", 0.0),
        ("dead_after_s", 0.5),
        ("max_attempts", 0),
        ("residency", "disk"),
        ("pool_tokens", -1),
        ("pool_tokens", 99),
        ("pool_eviction", "random"),
        ("kv_memory_bytes", -1),
        ("growth_tokens", 0),
        ("prefix_share", 1.5),
    ],
)
def test_bad_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{field} = "):
        LocalConfig(Path("model"), **{field: value})


def test_worker_config_survives_json() -> None:
    worker = LocalConfig(Path("model"), prefill_threads=3).worker("prefill", 1)
    assert WorkerConfig.from_json(worker.to_json()) == worker
    assert worker.num_threads == 3


def test_workers_of_one_cluster_share_their_node_s_prefixes_and_no_others() -> None:
    prefill = {"num_groups": 2, "prefix_share": 0.25, "prefix_disk_bytes": "2GiB"}
    cluster = ClusterConfig.model_validate({"name": "c", "prefill": prefill, "model": {"cache": "/disk"}})
    workers = [cluster.worker(Path("model"), "prefill", group, rank) for group in range(2) for rank in range(2)]
    workers.append(cluster.worker(Path("model"), "generate", 0, 0))
    assert {(worker.cluster, worker.prefix_share) for worker in workers} == {("c", 0.25)}
    assert {(worker.prefix_disk, worker.prefix_disk_bytes) for worker in workers} == {("/disk", 2 << 30)}
    assert LocalConfig(Path("model")).worker("prefill", 0).cluster != "c"


def test_engines_of_one_cluster_share_a_machine_s_memory() -> None:
    cluster = ClusterConfig.model_validate({"generate": {"num_groups": 3}})
    assert cluster.worker(Path("model"), "generate", 2, 0).num_engines == 3
    assert LocalConfig(Path("model")).worker("generate", 0).num_engines == 1


def test_the_engine_s_own_defaults_are_the_same() -> None:
    engine, local = EngineConfig(), LocalConfig(Path("model"))
    assert (engine.num_slots, engine.max_slot_tokens) == (local.num_slots, local.max_slot_tokens)
    assert engine.max_prefill_tokens_per_step == local.max_prefill_tokens_per_step
    for name in (
        "residency",
        "selection_file",
        "pool_tokens",
        "pool_eviction",
        "kv_memory_bytes",
        "device_memory_bytes",
        "growth_tokens",
        "max_step_stretch",
    ):
        assert getattr(engine, name) == getattr(local, name)


def test_the_ways_to_evict_are_the_pools() -> None:
    assert tuple(each.value for each in Eviction) == EVICTIONS


def test_an_engine_is_told_its_pool() -> None:
    generate = {"residency": "infinigen", "pool_tokens": 500, "pool_eviction": "lru"}
    worker = ClusterConfig.model_validate({"generate": generate}).worker(Path("model"), "generate", 0, 0)
    assert (worker.pool_tokens, worker.pool_eviction) == (500, "lru")
