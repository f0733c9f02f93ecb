"""A calibration that is given to a running orchestrator counts at once, is kept, and must be of what it serves."""

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from baton.errors import ConfigError, InvalidArgumentError
from baton.planning import step_times
from baton.planning.calibration import Calibration, calibrate_chain, dumps, load, loads, nominal, save
from baton.planning.fit import RankRow
from baton.planning.hardware import cpu_rank
from baton.planning.planner import ChainPlanner
from baton.planning.step_times import StepTimes, nominal_steps, tabulate
from baton.rpc_status import translate_rpc_errors
from baton.transport.channel import make_channel, make_server
from baton.v1 import planning_pb2 as pb
from baton.v1.planning_pb2_grpc import PlanningStub, add_PlanningServicer_to_server
from baton_lab.study.known_models import SHAPES
from orchestrator.api.planning import Context, PlanningServicer
from tests.support.eventually import eventually
from tests.support.wire.rpc import listening

if TYPE_CHECKING:
    from baton.v1.planning_pb2_grpc import PlanningAsyncStub

pytestmark = pytest.mark.integration

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
    async with listening(server) as port, make_channel(f"127.0.0.1:{port}") as channel:
        yield PlanningStub(channel)


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
    with pytest.raises(ConfigError, match="calibration: is not valid JSON"):
        await use(stub, "{half")
    assert planner.calibration is ASSUMED and not await asyncio.to_thread(path.exists)


async def test_one_that_is_far_from_the_one_in_force_must_be_forced(
    stub: "PlanningAsyncStub", planner: ChainPlanner, path: Path
) -> None:
    made = measured()
    absurd = dataclasses.replace(made, cost=made.cost.times(1e6))
    with pytest.raises(InvalidArgumentError, match="calibration: a prompt of 256 tokens .* measure again, or force it"):
        await use(stub, dumps(absurd))
    assert planner.calibration is ASSUMED and not await asyncio.to_thread(path.exists)
    await stub.UseCalibration(pb.UseCalibrationRequest(calibration=dumps(absurd), force=True))
    assert planner.calibration == absurd == load(path)


async def test_one_that_cannot_be_kept_does_not_count(
    stub: "PlanningAsyncStub", planner: ChainPlanner, path: Path
) -> None:
    path.parent.write_text("a file, and no folder")
    with pytest.raises(ConfigError, match="cannot be made"):
        await use(stub, dumps(measured()))
    assert planner.calibration is ASSUMED


async def test_a_call_that_is_given_up_leaves_file_and_planner_agreeing(
    planner: ChainPlanner, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given up while the file is being written: it is too late then, and the planner follows."""
    made, servicer = measured(), PlanningServicer(planner, path)
    writing, may_write = threading.Event(), threading.Event()

    def slow_save(calibration: Calibration, to: Path) -> None:
        writing.set()
        assert may_write.wait(60)
        save(calibration, to)

    monkeypatch.setattr("baton.planning.calibration.save", slow_save)
    request = pb.UseCalibrationRequest(calibration=dumps(made))
    call = asyncio.create_task(servicer.UseCalibration(request, cast(Context, None)))
    assert await asyncio.to_thread(writing.wait, 10)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert planner.calibration is ASSUMED and not await asyncio.to_thread(path.exists)
    may_write.set()
    await eventually(lambda: as_now(planner.calibration), lambda calibration: calibration == made)
    assert load(path) == made


async def as_now(calibration: Calibration) -> Calibration:
    return calibration


STEPS = nominal_steps("smollm2-135m", "two cores", SHAPE, cpu_rank(2, SHAPE.dtype_bytes))


def table(origin: StepTimes = STEPS) -> StepTimes:
    return tabulate(origin, (1, 4), (64, 256), ((0.01, 0.02), (0.02, 0.05)))[0]


async def use_steps(stub: "PlanningAsyncStub", text: str) -> pb.StepTimesInUse:
    with translate_rpc_errors():
        return await stub.UseStepTimes(pb.UseStepTimesRequest(step_times=text))


async def test_step_times_are_shown_taken_and_kept_beside_the_calibration(
    stub: "PlanningAsyncStub", planner: ChainPlanner, path: Path
) -> None:
    planner.use_steps(STEPS)
    kept = path.with_name(f"{STEPS.fingerprint}.json")
    shown = await stub.GetStepTimes(pb.GetStepTimesRequest())
    assert step_times.loads(shown.step_times, "shown") == STEPS
    assert (shown.fingerprint, shown.is_measured, shown.path) == (STEPS.fingerprint, False, str(kept))
    reply = await use_steps(stub, step_times.dumps(table()))
    assert reply.is_measured and planner.steps == table() == step_times.load(kept)
    assert planner.step_s(4, 256) == pytest.approx(0.05) and planner.calibration is ASSUMED


async def test_step_times_that_are_far_from_those_in_force_must_be_forced(
    stub: "PlanningAsyncStub", planner: ChainPlanner
) -> None:
    planner.use_steps(table())
    slow = tabulate(STEPS, (1, 4), (64, 256), ((10.0, 20.0), (20.0, 50.0)))[0]
    with pytest.raises(InvalidArgumentError, match="step_times: a step of 1 rows .* measure again, or force it"):
        await use_steps(stub, step_times.dumps(slow))
    assert planner.steps == table()
    await stub.UseStepTimes(pb.UseStepTimesRequest(step_times=step_times.dumps(slow), force=True))
    assert planner.steps == slow


async def test_step_times_of_another_engine_are_refused(
    stub: "PlanningAsyncStub", planner: ChainPlanner, path: Path
) -> None:
    with pytest.raises(ConfigError, match="was given no step times"):
        await use_steps(stub, step_times.dumps(table()))
    planner.use_steps(STEPS)
    foreign = table(dataclasses.replace(STEPS, hardware="an abacus"))
    with pytest.raises(InvalidArgumentError, match="step_times are of smollm2-135m on an abacus, .* run `baton cal"):
        await use_steps(stub, step_times.dumps(foreign))
    with pytest.raises(ConfigError, match="step_times: is not valid JSON"):
        await use_steps(stub, "{half")
    assert planner.steps is STEPS and not await asyncio.to_thread(path.parent.exists)
