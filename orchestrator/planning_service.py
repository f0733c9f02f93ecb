"""Which calibration the orchestrator predicts by, over gRPC: shows it, and takes another one while requests run.

The second half of `baton calibrate`. On the process's asyncio loop; knots are searched, and files written, in a thread.
"""

import asyncio
import logging
from pathlib import Path
from typing import Any

import grpc

from baton.errors import ConfigError, InvalidArgumentError
from baton.v1 import planning_pb2 as pb
from baton.v1 import planning_pb2_grpc
from planning.calibration import Calibration, dumps, loads, save
from planning.planner import ChainPlanner

Context = grpc.aio.ServicerContext[Any, Any]

SERVICE = pb.DESCRIPTOR.services_by_name["Planning"].full_name

logger = logging.getLogger(__name__)


class PlanningServicer(planning_pb2_grpc.PlanningServicer):
    """Serves baton.v1.Planning over the planner that the controller asks."""

    def __init__(self, planner: ChainPlanner, path: Path | None) -> None:
        """A calibration that is taken is kept at `path`, where the orchestrator's next life finds it; None: nowhere."""
        self._planner = planner
        self._path = path
        self._using = asyncio.Lock()

    async def GetCalibration(self, request: pb.GetCalibrationRequest, context: Context) -> pb.CalibrationInUse:
        """The one in force."""
        return self._in_use()

    async def UseCalibration(self, request: pb.UseCalibrationRequest, context: Context) -> pb.CalibrationInUse:
        """Predicts by the given one from the answer on. Raises ConfigError for a damaged text, or when it cannot be
        kept, and InvalidArgumentError for one of another model or hardware; nothing has changed then."""
        calibration = loads(request.calibration, "calibration")
        own = self._planner.calibration
        if calibration.fingerprint != own.fingerprint:
            raise InvalidArgumentError(
                f"calibration is of {calibration.model} on {calibration.hardware}, in another shape or place than "
                f"{own.model} on {own.hardware}, which is served: run `baton calibrate` on this cluster"
            )
        async with self._using:
            if self._path is not None:
                await asyncio.to_thread(_keep, calibration, self._path)
            await asyncio.to_thread(self._planner.use, calibration)
        logger.info("predicting by a calibration of %d rows", len(calibration.rank_rows))
        return self._in_use()

    def _in_use(self) -> pb.CalibrationInUse:
        calibration = self._planner.calibration
        return pb.CalibrationInUse(
            calibration=dumps(calibration),
            fingerprint=calibration.fingerprint,
            is_measured=calibration.is_measured,
            path=str(self._path or ""),
        )


def _keep(calibration: Calibration, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path.parent}: cannot be made ({error.strerror}): give the orchestrator a cache") from error
    save(calibration, path)
