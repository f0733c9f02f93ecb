"""What every Spawner promises, asked of the ones that run without Ray; tests/system asks the same of Ray's actors."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import BatonError
from baton.v1.keeping_pb2 import UpdateRequest
from baton.v1.keeping_pb2_grpc import KeepingStub
from deploy.config.file import make_local_config
from deploy.config.worker import WorkerConfig
from deploy.groups.processes import ProcessSpawner, WorkerStartError
from deploy.groups.spawner import Spawner, WorkerHandle
from deploy.groups.worker import Worker
from tests.support.clusters.spawners import InProcessSpawner, orchestrator_worker
from tests.support.wire.secret import SECRET
from transport.channel import make_channel

MakeSpawner = Callable[[], Spawner]


@pytest.fixture(params=[InProcessSpawner, lambda: ProcessSpawner(60.0)], ids=["in process", "child processes"])
def spawner(request: pytest.FixtureRequest) -> Spawner:
    make: MakeSpawner = request.param
    return make()


@pytest.fixture
def rank(smollm2: Path) -> WorkerConfig:
    return make_local_config({"model": {"dtype": "float32"}}).workers("prefill-0", smollm2, secret=SECRET)[0]


@pytest.fixture(params=["prefill", "orchestrator"])
def config(request: pytest.FixtureRequest, smollm2: Path, rank: WorkerConfig) -> WorkerConfig:
    return orchestrator_worker(smollm2) if request.param == "orchestrator" else rank


async def _answers(handle: WorkerHandle) -> bool:
    if handle.config.role == "orchestrator":
        async with make_channel(handle.endpoint, secret=SECRET) as channel:
            status = await KeepingStub(channel).Update(UpdateRequest(), timeout=10)
        await handle.close()
        return status.port == 0  # it waits for its supervisor's word
    worker = Worker(handle)
    try:
        return bool((await worker.status(10.0)).version)
    finally:
        await worker.close()


async def test_a_started_worker_serves_and_a_closed_one_has_ended(spawner: Spawner, config: WorkerConfig) -> None:
    handle = await spawner.start(config)
    assert handle.config == config
    assert not handle.ended
    assert await _answers(handle)
    assert handle.ended
    assert await handle.wait()


async def test_a_killed_worker_ends_and_may_be_killed_and_closed_again(spawner: Spawner, config: WorkerConfig) -> None:
    handle = await spawner.start(config)
    handle.kill()
    assert await handle.wait()
    assert handle.ended
    handle.kill()
    await handle.close()
    await handle.close()


async def test_a_worker_that_cannot_start_gives_its_own_reason(rank: WorkerConfig) -> None:
    with pytest.raises(WorkerStartError, match="prefill-0.0: /absent: is not a model folder") as caught:
        await ProcessSpawner(60.0).start(replace(rank, place=replace(rank.place, model_folder=Path("/absent"))))
    assert isinstance(caught.value, BatonError)
