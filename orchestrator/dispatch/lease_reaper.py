"""Frees the resources of attempts: aborts leases, cancels streams, and undoes Reserve calls whose answers were lost.

Called by `orchestrator.dispatch.attempt`; calls workers through `orchestrator.workers.client`. The calls run in the
background after an attempt has ended. A call that undoes a Reserve is repeated until the worker has answered. If any
other call fails, the worker frees the slot or stream when its TTL expires. Runs on the event loop.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from baton.errors import BatonError, ResourceExhaustedError
from baton.process.backoff import Backoff
from baton.process.clock import Clock
from baton.types import Lease, LeaseRef, ReserveNumber, StreamNumber
from orchestrator.membership.members import Membership
from orchestrator.workers.client import VERB_TIMEOUT_S, Clients, WorkerClient

logger = logging.getLogger(__name__)

_PAUSES = Backoff(0.1, 2.0)
"""Increasing pauses between attempts to undo the same Reserve call."""


class LeaseReaper:
    """Frees the resources of attempts by calls to workers. Each call runs in its own task. Owned by the attempt
    runner."""

    def __init__(self, members: Membership, clients: Clients, clock: Clock, *, lease_ttl_s: float) -> None:
        self._members = members
        self._clients = clients
        self._clock = clock
        self._lease_ttl_s = lease_ttl_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()

    async def close(self) -> None:
        """Wait until all running tasks have tried their calls to workers at least once. A failed attempt to undo a
        Reserve call is not repeated any more: the lease ends when its TTL expires."""
        self._closing.set()
        await asyncio.gather(*self._tasks)

    def abort(self, endpoint: str, ref: LeaseRef) -> None:
        """Start a task that aborts a lease at the worker `endpoint` and frees its slot."""
        self._begin(self._abort(endpoint, ref))

    def cancel(self, endpoint: str, number: StreamNumber) -> None:
        """Start a task that ends the stream with this number at the generation worker `endpoint`."""
        self._begin(self._tell(endpoint, f"stream {number}", lambda worker: worker.cancel(number)))

    def unwanted(self, endpoint: str, number: ReserveNumber, granting: asyncio.Task[Lease]) -> None:
        """Start a task that waits for a Reserve call whose caller was cancelled. If the call is granted, the task frees
        the slots."""
        self._begin(self._end_unwanted(endpoint, number, granting))

    def failed(self, endpoint: str, number: ReserveNumber, error: BatonError) -> None:
        """Start a task that undoes a failed Reserve call, because the worker may have leased the slots although the
        call failed. Does nothing if the worker itself refused the call for lack of slots or memory."""
        if not isinstance(error, ResourceExhaustedError):
            self._begin(self._undo(endpoint, number))

    def _begin(self, call: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end_unwanted(self, endpoint: str, number: ReserveNumber, granting: asyncio.Task[Lease]) -> None:
        try:
            lease = await granting
        except BatonError as error:
            logger.debug("no known lease to release at %s: %s", endpoint, error)
            if not isinstance(error, ResourceExhaustedError):
                await self._undo(endpoint, number)
        else:
            await self._abort(endpoint, lease.ref)  # in this task, for which `close` waits

    async def _undo(self, endpoint: str, number: ReserveNumber) -> None:
        """Abort a Reserve call by its number. Tries again until the worker answers or is gone, or until the lease would
        have expired."""
        until_s = self._clock.now_s() + VERB_TIMEOUT_S + self._lease_ttl_s
        for num_failures in itertools.count(1):
            try:
                with self._clients.use(endpoint) as worker:
                    await worker.abort_reserve(number)
                return
            except BatonError as error:
                logger.info("Reserve %d at %s is in doubt, and was not aborted: %s", number, endpoint, error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), _PAUSES.after(num_failures))
                return
            if self._clock.now_s() > until_s or endpoint not in self._members.present.endpoints:
                return

    async def _abort(self, endpoint: str, ref: LeaseRef) -> None:
        await self._tell(endpoint, f"slot {ref.slot}", lambda worker: worker.abort(ref))

    async def _tell(self, endpoint: str, what: str, call: Callable[[WorkerClient], Awaitable[None]]) -> None:
        """Make a call that frees a resource at a worker. If the call fails, the worker frees the resource when its TTL
        expires."""
        try:
            with self._clients.use(endpoint) as worker:
                await call(worker)
        except BatonError as error:
            logger.info("%s at %s is left to its ttl: %s", what, endpoint, error)
