"""Runs one attempt's prefill job on all ranks of its chain. While the job runs, it is in its group's queue of
unfinished jobs.

Called by `orchestrator.dispatch.attempt` once the attempt has its slots. When the job has ended, for any reason,
all its calls to the ranks have ended, and it has been removed from the queue. Runs on the event loop, in a separate
task.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator, Sequence

from baton.errors import BatonError, StalePrefixError
from baton.process.clock import Clock
from baton.results.prefill_trace import RankTiming
from baton.types import Rank
from orchestrator.membership.members import Membership
from orchestrator.placement.prefix_index import PrefixIndex
from orchestrator.requests.config import OrchestratorConfig
from orchestrator.workers.client import Clients, WorkerClient
from orchestrator.workers.messages import PrefillJob

logger = logging.getLogger(__name__)

PrefillTask = asyncio.Task[tuple[RankTiming, ...]]
"""Task of one attempt's prefill on all ranks of its chain. Its result is the ranks' timings."""


class ChainRunner:
    """Runs prefill jobs on chains of ranks. Any number of jobs may run at the same time. Updates
    `Membership.prefill_queues`."""

    def __init__(
        self,
        members: Membership,
        clients: Clients,
        prefixes: PrefixIndex,
        clock: Clock,
        config: OrchestratorConfig,
    ) -> None:
        """Create a runner. `prefixes` is the prefix index, which is updated from the ranks' reports about their prefix
        stores."""
        self._members = members
        self._clients = clients
        self._prefixes = prefixes
        self._clock = clock
        self._config = config

    @contextlib.asynccontextmanager
    async def running(self, job: PrefillJob, owner: WorkerClient) -> AsyncIterator[PrefillTask]:
        """Run the job in a task while the context is open, and yield the task. `owner` is the client of the group that
        leased the slots.

        The job is cancelled when the context ends. Each rank counts as busy in the group's queue of unfinished jobs
        until its part of the job ends, or until the context ends.
        """
        with self._members.hold(job.group.name), self._booked(job):
            task = asyncio.create_task(self._run(job, owner))
            try:
                yield task
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def reports(self, task: PrefillTask) -> tuple[RankTiming, ...]:
        """Wait for the prefill, for at most `report_wait_s` seconds, and return the timings of its ranks. If the
        prefill fails or does not end in time, return an empty tuple and raise no error, because the request already has
        all its tokens."""
        await asyncio.wait({task}, timeout=self._config.report_wait_s)
        return task.result() if task.done() and failure_of(task) is None else ()

    @contextlib.contextmanager
    def _booked(self, job: PrefillJob) -> Iterator[None]:
        group, chain, record = job.group, job.chain, job.record
        self._members.prefill_queues.add(group.incarnation, job.number, chain.job, self._clock.now_s())
        logger.info(
            "prefill request=%s attempt=%d group=%s ranks=%s cached_tokens=%d: %s",
            *(record.request_id, record.attempt.number, group.name, ",".join(map(str, chain.ranks))),
            *(chain.num_cached_tokens, chain.choice.reason),
        )
        try:
            yield
        finally:
            self._release(job, chain.ranks)

    def _release(self, job: PrefillJob, ranks: Sequence[Rank]) -> None:
        self._members.prefill_queues.release(job.group.incarnation, job.number, ranks, self._clock.now_s())

    async def _run(self, job: PrefillJob, owner: WorkerClient) -> tuple[RankTiming, ...]:
        """Run the job on all its ranks, renewing the lease meanwhile. The first failure cancels the other ranks and is
        raised."""
        runs = [asyncio.create_task(self._run_rank(rank, job)) for rank in job.chain.ranks]
        pending = set(runs)
        try:
            while pending:
                done, pending = await asyncio.wait(
                    pending, timeout=self._config.lease_ttl_s / 3, return_when=asyncio.FIRST_EXCEPTION
                )
                for run in done:
                    run.result()
                if pending:
                    await _renew(owner, job)
            return tuple(run.result() for run in runs)
        finally:
            for run in runs:
                run.cancel()
            await asyncio.gather(*runs, return_exceptions=True)

    async def _run_rank(self, rank: Rank, job: PrefillJob) -> RankTiming:
        store, cached = job.group.prefix_store, job.blocks.cached(job.chain.num_cached_tokens)
        try:
            with self._clients.use(job.group.endpoints[rank]) as worker:
                report = await worker.run(job)
        except StalePrefixError:
            self._prefixes.forget(store, cached)
            raise
        finally:
            self._release(job, (rank,))
        self._prefixes.forget(store, report.evicted)
        self._prefixes.use(store, job.blocks.names[: len(cached) + len(report.stored)])
        return report.timing


def failure_of(task: PrefillTask) -> BaseException | None:
    """Return the exception with which the prefill failed. Return None if the prefill is still running, has succeeded or
    was cancelled."""
    return task.exception() if task.done() and not task.cancelled() else None


async def _renew(owner: WorkerClient, job: PrefillJob) -> None:
    """Renew the job's lease. A failure is only logged: a lost lease is reported by the stream, and is not caused by a
    rank."""
    try:
        await owner.renew(job.lease.ref, job.lease.ttl_s)
    except BatonError as error:
        logger.warning("slot %d at %s was not renewed: %s", job.lease.ref.slot, job.lease.endpoint, error)
