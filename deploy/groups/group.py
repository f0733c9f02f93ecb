"""Supervision of one worker group: starts its workers, watches them, and replaces workers that fail. Also creates the
links between the ranks of a prefill chain.

A worker whose process has ended is replaced immediately. If its replacements end too, each further one is started after
a longer pause. Two kinds of worker are killed and then replaced:

- a worker that has not answered heartbeats for `dead_after_s` seconds; a stopped process would block the links of its
  neighbours until it is killed
- a worker that reports that its engine hangs

When a rank was replaced, or reports that its links are broken, all ranks join a new epoch (a new set of links) as soon
as all of them answer. Groups do not wait for each other. An unexpected exception does not end a group's supervision. It
is logged with its traceback and reported, and the workers are checked again after a pause (`baton.process.endless`).

Runs on the supervisor's asyncio loop, in one task per group.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import grpc

from baton.errors import BatonError, UnavailableError
from baton.planning.device_profile import DeviceProfile, slowest
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
from orchestrator.api.keeping import profile_from_proto

logger = logging.getLogger(__name__)


class WorkerGroup:
    """Group of workers that can serve only if all of them run: the ranks of a prefill chain, or one generation engine.
    An object is used only once."""

    def __init__(
        self,
        name: str,
        configs: Sequence[WorkerConfig],
        surroundings: Surroundings,
        links: ChainLinks | None = None,
        *,
        room: tuple[str, int] | None = None,
    ) -> None:
        """Create a group without starting it. `links` is given only for a prefill chain. `room` is an existing
        reservation of resources that the workers use: (name of the group that it was made for, number of workers that
        it is large enough for). None: reserve resources for exactly the workers of this group."""
        self.name = name
        self.room, self.num_places = room or (name, len(configs))
        """Reservation of resources that the workers use: `room` is the name of the group that it was made for, and
        `num_places` the number of workers that it is large enough for."""
        self.links = links
        self.workers: dict[int, Worker] = {}
        """Current workers by rank. Empty before the group has been started."""
        self.layout_fingerprint = ""
        """Fingerprint of the group's KV layout, reported by its workers when they started."""
        self.residency = ""
        """Name of the residency policy of a generation engine, reported by the engine when it started. Empty for a
        prefill chain."""
        self.is_approximate = False
        """True if the engine's residency policy is approximate, because it does not attend to all tokens."""
        self._configs = tuple(configs)
        self._around = surroundings
        self._restarts = {config.rank: Restarts(surroundings.backoff, surroundings.clock) for config in configs}
        self._stores: dict[int, str] = {}
        """Name of the prefix store (prefix cache) of each worker's node, by rank, reported by the worker when it
        started. Empty text: the node has no store."""
        self._profiles: dict[int, DeviceProfile] = {}
        """Profile of each worker's device, by rank, reported by the worker when it started."""
        self._missing: dict[int, WorkerConfig] = {}
        """Configurations of the workers whose process has ended and that have not been replaced yet, by rank."""
        self._ready = asyncio.Event()
        self._look = asyncio.Event()
        self._changing = asyncio.Lock()
        """Lock that is held while heartbeats are sent, and while workers are replaced or moved between groups."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    @property
    def ready(self) -> bool:
        """True if, as far as the supervisor knows, all workers serve and, in a prefill chain, all links work."""
        return self._ready.is_set()

    @property
    def prefix_store(self) -> str:
        """Name of the prefix store (the node's prefix cache) that all workers of the group use. Empty if the node has
        no store. Also empty if the ranks of a chain run on several nodes, because the stores of these nodes may have
        different blocks."""
        stores = {*self._stores.values()}
        return stores.pop() if len(stores) == 1 else ""

    @property
    def profile(self) -> DeviceProfile | None:
        """Profile of the device of the group's slowest worker; None if no worker has reported its profile."""
        return slowest(self._profiles.values())

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Addresses (host:port) of the current workers, in rank order."""
        return tuple(self.workers[rank].handle.endpoint for rank in sorted(self.workers))

    @property
    def configs(self) -> Mapping[int, WorkerConfig]:
        """Configurations of all workers that belong to the group, by rank. A worker whose process has ended is
        included."""
        return {config.rank: config for config in self._configs}

    async def until_ready(self) -> None:
        """Wait until the group is ready to serve."""
        await self._ready.wait()

    def suspect(self) -> None:
        """Check the workers immediately instead of at the next heartbeat. Called when a call to a worker has failed.
        The group is not ready until the check is done."""
        self._set_ready(False)
        self._look.set()

    async def start(self, given: Mapping[int, WorkerHandle] = MappingProxyType({})) -> None:
        """Start the workers, and return when the group is ready. It is then supervised. `given` contains processes
        that are taken over from other groups, by their rank in this group; all other workers run in new processes.
        Raises the first failure. In this case, the caller must call `close` to clean up."""
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
        """Remove the worker of this rank from the group, and return its process, so that another group can use it.
        Return None if the process has ended. In a prefill chain, new links are then created between the remaining
        ranks."""
        async with self._changing:
            worker = self.workers.get(rank)
            if worker is not None:
                await worker.disconnect()
            self._configs = tuple(config for config in self._configs if config.rank != rank)
            for known in (self.workers, self._missing, self._stores, self._profiles):
                known.pop(rank, None)
            self.suspect()
            return None if worker is None or worker.handle.ended else worker.handle

    async def receive(self, config: WorkerConfig, given: WorkerHandle | None) -> None:
        """Add a worker to the group. It runs in the process `given`, which served in another group before, or in a new
        process if `given` is None. In a prefill chain, all links are created again. If the worker does not start, the
        start is retried with pauses, as for a worker that ended."""
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
        """End the supervision, then end the workers. The resources that are reserved for the group are not released,
        because workers of other groups may use them. Idempotent."""
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
            handle.kill()  # the supervision then replaces it
            raise
        self._restarts[config.rank].began()
        self._around.report(f"{worker.name} serves on {handle.endpoint}")

    async def _check(self, worker: Worker) -> None:
        """Check that the new worker answers and is compatible with the other workers, and store the properties that it
        reports."""
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
        if status.HasField("profile"):
            self._profiles[worker.handle.config.rank] = profile_from_proto(status.profile)

    async def _wake_at_end(self, handle: WorkerHandle) -> None:
        """Wait for the end of the worker's process, then wake the supervision. If the process crashed, report the
        requests that it was computing. If the wait itself fails, the supervision is woken, too, and heartbeats detect
        the end of the process."""
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
        """Supervise the workers until this task is cancelled. After errors it pauses, for at most `dead_after_s`
        seconds."""
        heartbeat = self._around.heartbeat
        pauses = Backoff(heartbeat.interval_s, heartbeat.dead_after_s)
        await repeat(f"the supervision of {self.name}", self._turn, pauses, self._around.report)

    async def _turn(self) -> None:
        """Wait until the next heartbeat must be sent or something has failed, then repair the group. Calls that a
        worker refuses or does not answer are retried at the next heartbeat."""
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
        group is ready afterwards, unless a worker is missing, or a worker does not answer heartbeats while the chain
        must be linked."""
        broken = await send_heartbeats(self.workers.values(), self.links, self._around)
        replaced = await self._replace_ended()
        if self._missing:
            return
        if self.links is not None and (broken or replaced or not self.ready):
            self._set_ready(False)
            if any(worker.failure_detector.has_begun for worker in self.workers.values()):
                return  # linking would fail: wait until the silent worker answers or is killed
            await self._link(self.links)
        self._set_ready(True)

    async def _replace_ended(self) -> bool:
        """Replace each worker whose process has ended and whose pause before a restart is over. Return whether at least
        one worker was replaced."""
        for rank, worker in self.workers.items():
            if worker.handle.ended and rank not in self._missing:
                self._set_ready(False)
                self._missing[rank] = worker.handle.config
                self._report_end(rank, f"{worker.name} ended with {await self._how_it_ended(worker)}")
        due = [config for rank, config in self._missing.items() if self._restarts[rank].is_due]
        replaced = await asyncio.gather(*(self._replace(config) for config in due))
        return any(replaced)

    async def _how_it_ended(self, worker: Worker) -> str:
        """Return a text for the report that describes how a worker's process ended. Raises nothing: if the wait for the
        process fails, the text describes that error."""
        try:
            return await worker.handle.wait()
        except Exception as error:  # noqa: BLE001 - logged by tell_failure, with its traceback
            tell_failure(f"{worker.name} ended, and its exit status is unknown", error)
            return describe(error)

    async def _replace(self, config: WorkerConfig) -> bool:
        """Close the ended worker, and start its replacement. Return whether the replacement started. A failure is
        reported, and the start is retried after a pause."""
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
