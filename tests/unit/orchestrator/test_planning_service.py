"""A calibration that is given to a running orchestrator counts at once, is kept, and must be of what it serves."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from baton.errors import ConfigError, InvalidArgumentError
from baton.status import translate_rpc_errors
from baton.v1 import planning_pb2 as pb
from baton.v1.planning_pb2_grpc import PlanningStub, add_PlanningServicer_to_server
from orchestrator.planning_service import PlanningServicer
from planning.calibration import Calibration, calibrate_chain, dumps, load, loads, nominal
from planning.fit import RankRow
from planning.hardware import cpu_rank
from planning.model_shape import SHAPES
from planning.planner import ChainPlanner
from transport.channel import bind, make_channel, make_server

if TYPE_CHECKING:
    from baton.v1.planning_pb2_grpc import PlanningAsyncStub

SHAPE = SHAPES["smollm2-135m"]
ASSUMED = nominal("smollm2-135m", "a core", SHAPE, cpu_rank(1, SHAPE.dtype_bytes))


def measured(origin: Calibration = ASSUMED) -> Calibration:
    rows = [RankRow(n, 0, True, 30 * (1e-3 + 1e-5 * n)) for n in (100, 200, 400)]
    return calibrate_chain(origin, rows, (), request_s=0.01)[0]


@pytest.fixture
def planner() -> ChainPlanner:
    return ChainPlanner(ASSUMED, max_ranks=2, max_tokens=256)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "calibrations" / "kept.json"


@pytest.fixture
async def stub(planner: ChainPlanner, path: Path) -> "AsyncIterator[PlanningAsyncStub]":
    server = make_server()
    add_PlanningServicer_to_server(PlanningServicer(planner, path), server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    async with make_channel(f"127.0.0.1:{port}") as channel:
        yield PlanningStub(channel)
    await server.stop(None)


async def use(stub: "PlanningAsyncStub", text: str) -> pb.CalibrationInUse:
    with translate_rpc_errors():
        return await stub.UseCalibration(pb.UseCalibrationRequest(calibration=text))


async def test_shows_what_is_in_force(stub: "PlanningAsyncStub", path: Path) -> None:
    shown = await stub.GetCalibration(pb.GetCalibrationRequest())
    assert loads(shown.calibration, "shown") == ASSUMED
    assert (shown.fingerprint, shown.is_measured, shown.path) == (ASSUMED.fingerprint, False, str(path))


async def test_another_one_counts_at_once_and_is_kept(
    stub: "PlanningAsyncStub", planner: ChainPlanner, path: Path
) -> None:
    made = measured()
    reply = await use(stub, dumps(made))
    assert reply.is_measured and loads(reply.calibration, "reply") == made
    assert planner.calibration == made == load(path)


async def test_one_of_another_model_or_machine_is_refused(
    stub: "PlanningAsyncStub", planner: ChainPlanner, path: Path
) -> None:
    foreign = measured(dataclasses.replace(ASSUMED, hardware="an abacus"))
    with pytest.raises(InvalidArgumentError, match="calibration is of smollm2-135m on an abacus, .* run `baton cal"):
        await use(stub, dumps(foreign))
    with pytest.raises(ConfigError, match="calibration: is no JSON"):
        await use(stub, "{half")
    assert planner.calibration is ASSUMED and not await asyncio.to_thread(path.exists)


async def test_one_that_cannot_be_kept_does_not_count(
    stub: "PlanningAsyncStub", planner: ChainPlanner, path: Path
) -> None:
    path.parent.write_text("a file, and no folder")
    with pytest.raises(ConfigError, match="cannot be made"):
        await use(stub, dumps(measured()))
    assert planner.calibration is ASSUMED
