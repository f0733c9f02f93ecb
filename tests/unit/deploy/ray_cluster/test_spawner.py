"""A worker that an earlier supervisor left is killed only when it is silent for as long as supervision bears."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from deploy.ray_cluster import spawner
from deploy.ray_cluster.spawner import RaySpawner
from tests.support.clusters.workers import tiny_worker


@pytest.mark.parametrize(("dead_after_s", "answers_after_s", "is_killed"), [(60.0, 0.01, False), (0.01, 60.0, True)])
async def test_a_worker_that_is_slow_to_answer_is_found(
    dead_after_s: float, answers_after_s: float, is_killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_worker("generate", folder=Path("model"))
    killed: list[object] = []
    left = SimpleNamespace(config=SimpleNamespace(remote=lambda: asyncio.sleep(answers_after_s, config)))
    monkeypatch.setattr(spawner, "_actor", lambda namespace, name: left)
    monkeypatch.setattr(spawner, "ray", SimpleNamespace(kill=killed.append))
    monkeypatch.setattr(spawner, "CLOSE_GRACE_S", 0.0)
    found = await RaySpawner("baton", 60.0, {}, dead_after_s)._find(config)
    assert (found, killed) == ((None, [left]) if is_killed else (left, []))
