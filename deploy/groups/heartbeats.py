"""Heartbeats of one group: the status of every worker is requested, and workers that are silent or hang are killed."""

import asyncio
import logging
from collections.abc import Iterable

import grpc

from baton.errors import UnavailableError
from baton.v1 import prefill_pb2
from deploy.groups.chain_links import ChainLinks
from deploy.groups.surroundings import Surroundings
from deploy.groups.worker import Worker

logger = logging.getLogger(__name__)


class Heartbeats:
    """Sends heartbeats to the workers of one group. Only a chain has `links`."""

    def __init__(self, links: ChainLinks | None, surroundings: Surroundings) -> None:
        self._links = links
        self._around = surroundings

    async def send(self, workers: Iterable[Worker]) -> bool:
        """Send one heartbeat to every worker; kill those that are silent or hang. Return whether a rank's links are
        broken. Raises the first failure once the heartbeats of all workers are done."""
        hearing = (self._hear(worker) for worker in workers)
        heard = await asyncio.gather(*hearing, return_exceptions=True)
        for outcome in heard:
            if isinstance(outcome, BaseException):
                raise outcome
        return any(heard)

    async def _hear(self, worker: Worker) -> bool:
        if worker.handle.ended:  # its channel may be closed already, if a replacement failed
            return False
        asked_s = self._around.clock.now_s()
        try:
            status = await worker.status(self._around.heartbeat.interval_s)
        except grpc.aio.AioRpcError as error:
            heartbeat = self._around.heartbeat
            silent_s = worker.failure_detector.go_on(asked_s, self._around.clock.now_s(), heartbeat.interval_s)
            if silent_s > heartbeat.dead_after_s:
                await self._kill(worker, f"has been silent for {silent_s:.1f} s ({error.code()})")
            return False
        worker.failure_detector.end()
        if status.stall:
            await self._kill(worker, f"hangs ({status.stall})")
            return False
        if not isinstance(status, prefill_pb2.PrefillStatus):
            return False
        has_moved = await self._has_moved(worker, status.epoch)
        return bool(status.epoch_error) or has_moved

    async def _has_moved(self, worker: Worker, epoch: int) -> bool:
        """Return whether a rank is in another epoch than its group, as a foreign StartEpoch call makes it; the next
        epoch comes after both. A rank in the last possible epoch is killed."""
        assert self._links is not None
        if epoch == self._links.epoch:
            return False
        try:
            self._links.skip_to(epoch)
        except UnavailableError as error:
            await self._kill(worker, f"cannot be linked ({error})")
            return False
        return True

    async def _kill(self, worker: Worker, why: str) -> None:
        """Kill the worker; return when its process has ended."""
        if not worker.handle.ended:
            logger.warning("%s %s: killing it", worker.name, why)
            worker.handle.kill()
            await worker.handle.wait()
