"""One group's supervisor: starts its workers, watches them, replaces dead ones, and gives a chain new links.

A worker whose process has ended is replaced at once; one that ends again and again, after a pause that grows. Two kinds
of worker are killed first: one that leaves heartbeats unanswered for `dead_after_s` (a stopped process holds its
neighbours' links until it dies), and one that answers that its engine hangs. When a rank was replaced, or reports that
its links broke, all ranks join a new epoch, once all answer. Groups do not wait for each other. No exception ends a
group's supervision: what was not foreseen is logged with its traceback and reported, and the workers are looked at
again after a pause (baton.process.endless).

Runs on the supervisor's asyncio loop, in one task for each group.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import grpc

from baton.errors import BatonError, UnavailableError
from baton.process.backoff import Backoff
from baton.process.endless import describe, repeat, tell_end, tell_failure
from baton.v1 import generate_pb2, prefill_pb2
from deploy.config.worker import WorkerConfig
from deploy.groups.chain_links import ChainLinks
from deploy.groups.heartbeats import send_heartbeats
from deploy.groups.restarts import Restarts
from deploy.groups.spawner import WorkerHandle
from deploy.groups.surroundings import Surroundings
from deploy.groups.worker import Worker

logger = logging.getLogger(__name__)


class WorkerGroup:
    """Workers that serve together or not at all: a chain's ranks, or one generation engine. Used once."""

    def __init__(
        self,
        name: str,
        configs: Sequence[WorkerConfig],
        surroundings: Surroundings,
        links: ChainLinks | None = None,
        *,
        room: tuple[str, int] | None = None,
    ) -> None:
        """Make a group that is not started yet. Only a chain has `links`. `room`: the group in whose room the workers
        run, and the number of places there; None: the group's own, with a place for each of these workers."""
        self.name = name
        self.room, self.num_places = room or (name, len(configs))
        """The group in whose room the workers run, and the number of places there."""
        self.links = links
        self.workers: dict[int, Worker] = {}
        """Current workers by rank; empty before the group has started."""
        self.layout_fingerprint = ""
        """Fingerprint of the group's KV layout, as its workers reported it at their start."""
        self.residency = ""
        """Residency policy of a generation engine, as it was reported at the engine's start; empty for a chain."""
        self.is_approximate = False
        """True if the residency policy attends to less than all tokens."""
        self._configs = tuple(configs)
        self._around = surroundings
        self._restarts = {config.rank: Restarts(surroundings.backoff, surroundings.clock) for config in configs}
        self._stores: dict[int, str] = {}
        """Prefix stores of the workers' nodes, by rank, as reported at their start; empty strings if there are none."""
        self._missing: dict[int, WorkerConfig] = {}
        """Configurations of workers whose process has ended and has not been replaced yet, by rank."""
        self._ready = asyncio.Event()
        self._look = asyncio.Event()
        self._changing = asyncio.Lock()
        """Held while workers are sent heartbeats, replaced, given or received."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    @property
    def ready(self) -> bool:
        """True if all workers serve and, in a chain, have links, as far as the supervisor knows."""
        return self._ready.is_set()

    @property
    def prefix_store(self) -> str:
        """Prefix store that all workers share with others of their node; empty if there is none, and for a chain whose
        ranks are on several nodes: each would have to have the same blocks."""
        stores = {*self._stores.values()}
        return stores.pop() if len(stores) == 1 else ""

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Addresses of the workers, host:port, in rank order."""
        return tuple(self.workers[rank].handle.endpoint for rank in sorted(self.workers))

    @property
    def configs(self) -> Mapping[int, WorkerConfig]:
        """Configurations of the workers that the group is to have, by rank."""
        return {config.rank: config for config in self._configs}

    async def until_ready(self) -> None:
        """Wait until the group is ready."""
        await self._ready.wait()

    def suspect(self) -> None:
        """Look at the workers now, not at the next heartbeat, because something failed. The group is not ready until
        that is done."""
        self._set_ready(False)
        self._look.set()

    async def start(self, given: Mapping[int, WorkerHandle] = MappingProxyType({})) -> None:
        """Start the workers and return when the group is ready; after that the group is supervised. The processes
        `given`, by rank, come from other groups and become its workers. Raises the first failure; `close` cleans up."""
        if self._around.room is not None:
            await self._around.room.reserve(self.room, self.num_places)
        spawns = (self._spawn(config, given.get(config.rank)) for config in self._configs)
        started = await asyncio.gather(*spawns, return_exceptions=True)
        for failure in started:
            if isinstance(failure, BaseException):
                raise failure
        if self.links is not None:
            await self._link(self.links)
        self._set_ready(True)
        supervising = asyncio.create_task(self._supervise())
        supervising.add_done_callback(self._tell_end)
        self._keep(supervising)

    async def give(self, rank: int) -> WorkerHandle | None:
        """Remove the place of this rank and return its worker, which serves in another group next; None when its
        process has ended. The other ranks of a chain are linked again."""
        async with self._changing:
            worker = self.workers.get(rank)
            if worker is not None:
                await worker.disconnect()
            self._configs = tuple(config for config in self._configs if config.rank != rank)
            for known in (self.workers, self._missing, self._stores):
                known.pop(rank, None)
            self.suspect()
            return None if worker is None or worker.handle.ended else worker.handle

    async def receive(self, config: WorkerConfig, given: WorkerHandle | None) -> None:
        """Add a worker, and link a chain again with it. The worker runs in the process `given`, or in a new one. If it
        does not start, it is retried like a worker that has ended."""
        async with self._changing:
            self._set_ready(False)
            self._configs = tuple(sorted((*self._configs, config), key=lambda each: each.rank))
            self._restarts.setdefault(config.rank, Restarts(self._around.backoff, self._around.clock))
            try:
                await self._spawn(config, given)
            except Exception as error:  # noqa: BLE001 - reported; logged with its traceback unless it is a BatonError
                self._not_replaced(config, error)
                self._missing[config.rank] = config
            else:
                with contextlib.suppress(BatonError, grpc.aio.AioRpcError):  # links are tried again below
                    await self._repair()
        self._look.set()

    async def close(self) -> None:
        """End the supervision, then the workers. Their room, in which other groups may have workers, stays reserved.
        Idempotent."""
        self._closing = True
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._set_ready(False)
        await asyncio.gather(*(worker.close() for worker in self.workers.values()))
        self.workers.clear()

    async def _spawn(self, config: WorkerConfig, given: WorkerHandle | None = None) -> None:
        """Start a worker, in a new process or the `given` one."""
        if given is None:
            handle = await self._around.spawner.start(config)
        else:
            await given.serve_as(config)
            handle = given
        worker = Worker(handle)
        self.workers[config.rank] = worker
        self._keep(asyncio.create_task(self._wake_at_end(handle)))
        try:
            await self._check(worker)
        except BaseException:
            handle.kill()  # it then counts as ended, and is replaced
            raise
        self._restarts[config.rank].began()
        self._around.report(f"{worker.name} serves on {handle.endpoint}")

    async def _check(self, worker: Worker) -> None:
        """Check that the new worker answers and agrees with the others, and keep what it reports."""
        try:
            status = await worker.status(self._around.heartbeat.dead_after_s)
        except grpc.aio.AioRpcError as error:
            where = f"{worker.name} at {worker.handle.endpoint}"
            raise UnavailableError(f"{where} does not answer ({error.code()})") from error
        self._around.compatibility.check(worker.handle.config, status)
        self.layout_fingerprint = status.layout_fingerprint
        if self.links is not None and isinstance(status, prefill_pb2.PrefillStatus):
            self.links.skip_to(status.epoch)
        if isinstance(status, generate_pb2.GenerationStatus):
            self.residency, self.is_approximate = status.residency, status.is_approximate
        self._stores[worker.handle.config.rank] = status.prefix_store.identity

    async def _wake_at_end(self, handle: WorkerHandle) -> None:
        """Wake the supervisor when the worker's process has ended, and report the work that it did if it crashed. A
        wait that fails wakes the supervisor, too; the heartbeats then detect the end."""
        try:
            await handle.wait()
        except Exception as error:  # noqa: BLE001 - logged by tell_failure, with its traceback
            tell_failure(f"{handle.config.name}: its end cannot be waited for", error, self._around.report)
        self._look.set()
        if handle.ended:
            await self._note_end(handle)

    async def _note_end(self, handle: WorkerHandle) -> None:
        crash = await handle.crash()
        if crash is not None:
            logger.error("%s crashed:\n%s", handle.config.name, crash.trace)
            num = len(crash.computing)
            self._around.report(
                f"{handle.config.name} crashed while it computed {num} new requests: see its trace in the log"
            )
        self._around.ended.add(handle.endpoint, handle.pid, crash, self._around.clock.now_s())
        self._around.changed()

    def _tell_end(self, supervising: asyncio.Task[None]) -> None:
        if not self._closing:
            tell_end(f"the supervision of {self.name}", self._around.report)(supervising)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _set_ready(self, ready: bool) -> None:
        if ready == self.ready:
            return
        if ready:
            self._ready.set()
        else:
            self._ready.clear()
        self._around.changed()

    async def _supervise(self) -> None:
        """Look after the workers until this task is cancelled. A pause is never longer than a worker may be silent."""
        heartbeat = self._around.heartbeat
        pauses = Backoff(heartbeat.interval_s, heartbeat.dead_after_s)
        await repeat(f"the supervision of {self.name}", self._turn, pauses, self._around.report)

    async def _turn(self) -> None:
        """Wait until a heartbeat is due or something failed, then repair what is wrong. What a worker refuses or leaves
        unanswered is tried again at the next heartbeat."""
        with contextlib.suppress(TimeoutError):  # not woken: the regular heartbeat is due
            async with asyncio.timeout(self._around.heartbeat.interval_s):  # wait_for may swallow a cancellation
                await self._look.wait()
        self._look.clear()
        try:
            async with self._changing:
                await self._repair()
        except (BatonError, grpc.aio.AioRpcError) as error:
            self._set_ready(False)
            logger.warning("supervision of %s: %s; trying again", self.name, error)
        except BaseException:  # a cancelled call's error included
            self._set_ready(False)
            raise

    async def _repair(self) -> None:
        """Send all workers a heartbeat, replace those that ended, and link a chain again if necessary. A chain that is
        not ready is always linked again, because an earlier attempt may have failed and ranks may have changed. The
        group is ready afterwards, unless a worker is missing, or is silent when its chain must be linked."""
        broken = await send_heartbeats(self.workers.values(), self.links, self._around)
        replaced = await self._replace_ended()
        if self._missing:
            return
        if self.links is not None and (broken or replaced or not self.ready):
            self._set_ready(False)
            if any(worker.failure_detector.has_begun for worker in self.workers.values()):
                return  # the others would wait in vain: the silent worker answers soon, or is killed
            await self._link(self.links)
        self._set_ready(True)

    async def _replace_ended(self) -> bool:
        """Replace each worker whose process has ended, if its pause is over. Return whether a worker was replaced."""
        for rank, worker in self.workers.items():
            if worker.handle.ended and rank not in self._missing:
                self._set_ready(False)
                self._missing[rank] = worker.handle.config
                self._report_end(rank, f"{worker.name} ended with {await self._how_it_ended(worker)}")
        due = [config for rank, config in self._missing.items() if self._restarts[rank].is_due]
        replaced = await asyncio.gather(*(self._replace(config) for config in due))
        return any(replaced)

    async def _how_it_ended(self, worker: Worker) -> str:
        """Return how a worker's process ended, for the report, even if waiting for it fails."""
        try:
            return await worker.handle.wait()
        except Exception as error:  # noqa: BLE001 - logged by tell_failure, with its traceback
            tell_failure(f"{worker.name} ended, and its exit status is unknown", error)
            return describe(error)

    async def _replace(self, config: WorkerConfig) -> bool:
        """Close the ended worker, and start its replacement. Return whether that succeeded. A failure is reported, and
        retried after the worker's pause."""
        try:
            if config.rank in self.workers:
                await self.workers[config.rank].close()
            await self._spawn(config)
        except Exception as error:  # noqa: BLE001 - reported; logged with its traceback unless it is a BatonError
            self._not_replaced(config, error)
            return False
        del self._missing[config.rank]
        return True

    def _not_replaced(self, config: WorkerConfig, error: Exception) -> None:
        if not isinstance(error, BatonError):
            tell_failure(f"{config.name} could not be replaced", error)
        self._report_end(config.rank, f"{config.name} could not be replaced ({describe(error)})")

    def _report_end(self, rank: int, what: str) -> None:
        restarts = self._restarts[rank]
        delay_s = restarts.ended()
        pause = f", {restarts.num_ends} times in a row: next try in {delay_s:g} s" if delay_s else ": replacing it"
        self._around.report(what + pause)

    async def _link(self, links: ChainLinks) -> None:
        await links.renew([self.workers[rank] for rank in sorted(self.workers)])
        self._around.report(f"{self.name}, epoch {links.epoch}: {len(self.workers)} ranks linked")
