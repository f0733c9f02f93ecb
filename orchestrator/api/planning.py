"""Serves over gRPC the measurements from which the planner makes its predictions. The measurements can be replaced
while requests run.

It is the server side of `baton calibrate`. The measurements are a calibration of chains, and a table of generation step
times. Runs on the process's event loop. The search for chain partitions and the writing of files run in a thread.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from baton.errors import ConfigError, InvalidArgumentError
from baton.planning import calibration, step_times
from baton.planning.calibration import Calibration
from baton.planning.planner import ChainPlanner
from baton.planning.step_times import StepTimes
from baton.proto_types import scalars
from baton.v1 import planning_pb2 as pb
from baton.v1 import planning_pb2_grpc
from orchestrator.api.closeness import require_close

Context = grpc.aio.ServicerContext[Any, Any]

SERVICE = pb.DESCRIPTOR.services_by_name["Planning"].full_name

logger = logging.getLogger(__name__)


class PlanningServicer(planning_pb2_grpc.PlanningServicer):
    """Serves baton.v1.Planning for the planner that the scheduler uses."""

    def __init__(self, planner: ChainPlanner, path: Path | None) -> None:
        """Create the service. `path` is the file in which new calibrations are saved for later runs. New step times are
        saved in a second file in the same folder. If `path` is None, nothing is saved."""
        self._planner = planner
        self._path = path
        self._using = asyncio.Lock()

    async def GetCalibration(self, request: pb.GetCalibrationRequest, context: Context) -> pb.CalibrationInUse:
        """Return the calibration that predictions currently use."""
        return self._calibration_in_use()

    async def UseCalibration(self, request: pb.UseCalibrationRequest, context: Context) -> pb.CalibrationInUse:
        """Save the given calibration, and use it for predictions from now on. If it cannot be saved, it is not used. If
        the call is cancelled after saving has begun, the calibration is nevertheless saved and used.

        Raises ConfigError if the text is damaged or cannot be saved. Raises InvalidArgumentError if the calibration
        belongs to another model or other hardware, or if it differs too much from the current calibration and `force`
        is not set. After an error, the previous calibration stays in use.
        """
        given = calibration.loads(request.calibration, "calibration")
        _require_same("calibration is", given, self._planner.calibration)
        if not request.force:
            require_close("calibration", given, self._planner.calibration)
        basis = await asyncio.to_thread(self._planner.search, given)
        await self._take(self._path, partial(calibration.save, given), partial(self._planner.adopt, basis))
        return self._calibration_in_use()

    async def GetStepTimes(self, request: pb.GetStepTimesRequest, context: Context) -> pb.StepTimesInUse:
        """Return the step times (durations of generation steps) that predictions currently use. Raises ConfigError if
        the planner has no step times."""
        return self._steps_in_use()

    async def UseStepTimes(self, request: pb.UseStepTimesRequest, context: Context) -> pb.StepTimesInUse:
        """Save the given step times, and use them for predictions from now on. If they cannot be saved, they are not
        used. If the call is cancelled after saving has begun, the step times are nevertheless saved and used.

        Raises ConfigError if the text cannot be parsed or saved, or if the planner has no step times to replace. Raises
        InvalidArgumentError if the step times are of another model or hardware. Also raises InvalidArgumentError if
        they differ too much from those in use and `force` is not set.
        """
        given = step_times.loads(request.step_times, "step_times")
        _require_same("step_times are", given, self._steps())
        if not request.force:
            require_close("step_times", given, self._steps())
        path = self._steps_path(given)
        await self._take(path, partial(step_times.save, given), partial(self._planner.use_steps, given))
        return self._steps_in_use()

    async def _take(self, path: Path | None, save: Callable[[Path], None], adopt: Callable[[], None]) -> None:
        """Save a measurement, then use it for predictions. This is completed even if the call is cancelled, so that the
        file and the planner agree."""

        async def both() -> None:
            async with self._using:
                try:
                    if path is not None:
                        await asyncio.to_thread(_keep, path, save)
                except ConfigError as error:
                    logger.warning("the former measurements stay in force: %s", error)  # the caller may be gone
                    raise
                adopt()
            logger.info("predicting by other measurements, kept in %s", path or "no file")

        await asyncio.shield(asyncio.create_task(both()))

    def _steps(self) -> StepTimes:
        if self._planner.steps is None:
            raise ConfigError("this orchestrator was given no step times: start it by `baton serve`")
        return self._planner.steps

    def _steps_path(self, times: StepTimes) -> Path | None:
        return None if self._path is None else step_times.path_beside(self._path, times)

    def _calibration_in_use(self) -> pb.CalibrationInUse:
        in_use = self._planner.calibration
        text, path = calibration.dumps(in_use), str(self._path or "")
        return pb.CalibrationInUse(calibration=text, path=path, **scalars(pb.CalibrationInUse, in_use))

    def _steps_in_use(self) -> pb.StepTimesInUse:
        in_use = self._steps()
        text, path = step_times.dumps(in_use), str(self._steps_path(in_use) or "")
        return pb.StepTimesInUse(step_times=text, path=path, **scalars(pb.StepTimesInUse, in_use))


def _require_same(what: str, given: Calibration | StepTimes, own: Calibration | StepTimes) -> None:
    if given.fingerprint != own.fingerprint:
        raise InvalidArgumentError(
            f"{what} of {given.model} on {given.hardware}, in another shape or place than {own.model} on "
            f"{own.hardware}, which is served: run `baton calibrate` on this cluster"
        )


def _keep(path: Path, save: Callable[[Path], None]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path.parent}: cannot be made ({error.strerror}): give the orchestrator a cache") from error
    save(path)
