"""Sends the heartbeats of one group. A heartbeat requests the status of a worker. A worker that does not answer for
`dead_after_s` seconds, or whose engine hangs, is killed."""

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


async def send_heartbeats(workers: Iterable[Worker], links: ChainLinks | None, around: Surroundings) -> bool:
    """Send one heartbeat to every worker of a group. Kill a worker that has not answered for more than `dead_after_s`
    seconds, or whose engine hangs. Return True if the links of at least one rank are broken. `links` is None if the
    group is not a prefill chain. An unexpected error of a heartbeat is raised after the heartbeats of all workers have
    ended."""
    heard = await asyncio.gather(*(_hear(worker, links, around) for worker in workers), return_exceptions=True)
    for outcome in heard:
        if isinstance(outcome, BaseException):
            raise outcome
    return any(heard)


async def _hear(worker: Worker, links: ChainLinks | None, around: Surroundings) -> bool:
    if worker.handle.ended:  # its channel may be closed already, if a replacement failed
        return False
    heartbeat, asked_s = around.heartbeat, around.clock.now_s()
    try:
        status = await worker.status(heartbeat.interval_s)
    except grpc.aio.AioRpcError as error:
        silent_s = worker.failure_detector.go_on(asked_s, around.clock.now_s(), heartbeat.interval_s)
        if silent_s > heartbeat.dead_after_s:
            await _kill(worker, f"has been silent for {silent_s:.1f} s ({error.code()})")
        return False
    worker.failure_detector.end()
    around.terms.hear(status.term)
    if status.stall:
        await _kill(worker, f"hangs ({status.stall})")
        return False
    if not isinstance(status, prefill_pb2.PrefillStatus):
        return False
    assert links is not None
    has_moved = await _has_moved(worker, status.epoch, links)
    return bool(status.epoch_error) or has_moved


async def _has_moved(worker: Worker, epoch: int, links: ChainLinks) -> bool:
    """Return whether a rank is in another epoch than its group, which happens after a foreign StartEpoch call. If so,
    the number of the next epoch will be greater than both. A rank in the last possible epoch is killed."""
    if epoch == links.epoch:
        return False
    try:
        links.skip_to(epoch)
    except UnavailableError as error:
        await _kill(worker, f"cannot be linked ({error})")
        return False
    return True


async def _kill(worker: Worker, why: str) -> None:
    """Kill the worker, and wait until its process has ended."""
    if not worker.handle.ended:
        logger.warning("%s %s: killing it", worker.name, why)
        worker.handle.kill()
        await worker.handle.wait()
