"""One suite for the Spawners that run without Ray; tests/system has the same for Ray's actors."""

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import BatonError, UnavailableError
from baton.settings.place import WorkerPlace
from baton.transport.channel import make_channel
from baton.v1.keeping_pb2 import UpdateRequest
from baton.v1.keeping_pb2_grpc import KeepingStub
from deploy.config.file import WrittenConfig
from deploy.config.worker import WorkerConfig
from deploy.groups.processes import ProcessSpawner, WorkerStartError
from deploy.groups.spawner import Spawner, WorkerHandle
from deploy.groups.worker import Worker
from tests.support.clusters.workers import InProcessSpawner, orchestrator_worker
from tests.support.wire.secret import SECRET

pytestmark = pytest.mark.integration

MakeSpawner = Callable[[], Spawner]
WAIT_S = 60.0


@pytest.fixture(params=[InProcessSpawner, lambda: ProcessSpawner(WAIT_S)], ids=["in process", "child processes"])
def spawner(request: pytest.FixtureRequest) -> Spawner:
    make: MakeSpawner = request.param
    return make()


@pytest.fixture
def rank(smollm2: Path) -> WorkerConfig:
    return WrittenConfig({"model": {"dtype": "float32"}}).local.config.workers(
        "prefill-0", WorkerPlace(model_folder=smollm2, secret=SECRET.text)
    )[0]


@pytest.fixture(params=["prefill", "orchestrator"])
def config(request: pytest.FixtureRequest, smollm2: Path, rank: WorkerConfig) -> WorkerConfig:
    return orchestrator_worker(smollm2) if request.param == "orchestrator" else rank


async def _answers(handle: WorkerHandle) -> bool:
    if handle.config.role == "orchestrator":
        async with make_channel(handle.endpoint, secret=SECRET) as channel:
            status = await KeepingStub(channel).Update(UpdateRequest(), timeout=WAIT_S)
        await handle.close()
        return status.port == 0  # it waits for its supervisor's word
    worker = Worker(handle)
    try:
        return bool((await worker.status(WAIT_S)).version)
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


@pytest.mark.parametrize(("by", "crashes"), [(signal.SIGABRT, True), (signal.SIGKILL, False)])
async def test_a_worker_that_crashed_leaves_its_trace_and_a_killed_one_does_not(
    rank: WorkerConfig, by: signal.Signals, crashes: bool
) -> None:
    handle = await ProcessSpawner(WAIT_S).start(rank)
    os.kill(handle.pid, by)
    await handle.wait()
    crash = await handle.crash()
    assert (crash is not None) == crashes
    assert crash is None or (crash.computing == () and "Aborted" in crash.trace)
    assert await handle.crash() is None


async def test_a_worker_that_cannot_start_gives_its_own_reason(rank: WorkerConfig) -> None:
    with pytest.raises(WorkerStartError, match="prefill-0.0: /absent: is not a model folder") as caught:
        await ProcessSpawner(WAIT_S).start(replace(rank, place=replace(rank.place, model_folder=Path("/absent"))))
    assert isinstance(caught.value, BatonError)


@pytest.fixture
def engine(smollm2: Path, rank: WorkerConfig) -> WorkerConfig:
    """A generation engine in the place of the rank."""
    config = WrittenConfig(
        {"model": {"dtype": "float32"}, "generate": {"num_slots": 2, "max_slot_tokens": 256}}
    ).local.config
    return config.workers("generate-0", WorkerPlace(model_folder=smollm2, secret=SECRET.text))[0].in_place_of(rank)


async def test_a_worker_changes_its_role_in_the_same_process(
    spawner: Spawner, rank: WorkerConfig, engine: WorkerConfig
) -> None:
    handle = await spawner.start(rank)
    pid, first = handle.pid, handle.endpoint
    await handle.serve_as(engine)
    assert (handle.config, handle.pid) == (engine, pid)
    assert handle.endpoint != first
    await handle.serve_as(rank)
    assert (handle.config, handle.pid) == (rank, pid)
    assert not handle.ended
    assert await _answers(handle)


async def test_a_worker_that_cannot_serve_in_another_role_gives_its_reason_and_ends(
    rank: WorkerConfig, engine: WorkerConfig
) -> None:
    handle = await ProcessSpawner(WAIT_S).start(rank)
    with pytest.raises(WorkerStartError, match="generate-0: /absent: is not a model folder"):
        await handle.serve_as(replace(engine, place=replace(engine.place, model_folder=Path("/absent"))))
    assert await handle.wait()


async def test_a_worker_that_is_killed_meanwhile_ends(
    spawner: Spawner, rank: WorkerConfig, engine: WorkerConfig
) -> None:
    handle = await spawner.start(rank)
    changing = asyncio.create_task(handle.serve_as(engine))
    await asyncio.sleep(0)
    handle.kill()
    with pytest.raises(UnavailableError, match="ended .*before it served"):
        await changing
    assert await handle.wait()
