"""Runs workers as Ray actors. The actors are detached and named, so that a restarted supervisor finds them again by
name. Each actor runs in a bundle of the placement group of its group of workers.

An actor keeps the name and the bundle of the worker for which it was made, even while it is lent to another group. If
the actor is replaced, the new actor gets the same name and bundle. A restarted supervisor requests the same workers
again and gets those that still serve. Ray does not notice that a process is stopped (SIGSTOP), and would not end such a
process. Therefore `kill` sends SIGKILL on the worker's node instead. Functions run on the supervisor's event loop.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Coroutine, Mapping
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from baton.errors import UnavailableError
from baton.process.crash_notes import Crash, read_crash
from baton.process.endless import describe, tell_failure
from baton.settings.addresses import join_address
from deploy.config.worker import WorkerConfig
from deploy.groups.processes import CLOSE_GRACE_S, WorkerStartError
from deploy.ray_cluster.ray_worker import Served, WorkerActor
from orchestrator.membership.view import place_of, role_of

logger = logging.getLogger(__name__)

SMALL_CPU = 0.01
"""Number of CPUs that a worker's bundle requests from Ray. The number is small because Baton's configuration, not Ray,
assigns cores to workers."""
_MAX_CALLS = 16


class RayWorker:
    """Handle of a Ray actor that serves as a worker. Implements the interface WorkerHandle."""

    def __init__(self, config: WorkerConfig, actor: "ActorHandle[Any]", served: Served, timeout_s: float) -> None:
        self.config = config
        self.endpoint = join_address(served.host, served.port)
        self.pid = served.pid
        self._timeout_s = timeout_s
        self._node_id = served.node_id
        self._crash_note = served.crash_note
        self._actor = actor
        self._end = ""
        self._watch = asyncio.create_task(self._until_end())

    @property
    def ended(self) -> bool:
        return bool(self._end)

    async def wait(self) -> str:
        await asyncio.shield(self._watch)
        return self._end

    async def crash(self) -> Crash | None:
        try:
            return await asyncio.wait_for(_read_crash(self._crash_note, self._node_id), CLOSE_GRACE_S)
        except (RayError, TimeoutError) as error:
            logger.warning("%s: its crash note cannot be read (%s)", self.config.name, describe(error))
            return None

    async def serve_as(self, config: WorkerConfig) -> None:
        """Make the actor serve with this configuration instead of its former one. Raises WorkerStartError or
        UnavailableError. After an error the actor has ended or is about to end."""
        served = await _serve(self._actor, config, self._timeout_s)
        self.config, self.endpoint = config, join_address(served.host, served.port)

    def kill(self) -> None:
        """Send SIGKILL to the worker's process on its node. This also ends a process that was stopped by SIGSTOP. Then
        end the actor, so that Ray does not restart it."""
        if self.ended:
            return
        kill_process(self.pid, self._node_id)
        ray.kill(self._actor)

    async def close(self) -> None:
        """End the server, then the actor's process. Returns when the process has ended."""
        if not self.ended:
            with contextlib.suppress(RayError, TimeoutError):  # the actor is ended below in any case
                await asyncio.wait_for(answer(self._actor.stop.remote()), CLOSE_GRACE_S)
            ray.kill(self._actor)  # not by a signal, after which Ray would report to the user that a worker died
            try:
                await asyncio.wait_for(self.wait(), CLOSE_GRACE_S)
            except TimeoutError:
                self.kill()
        await self.wait()

    async def _until_end(self) -> None:
        try:
            await self._actor.live.remote()
        except RayError as error:
            self._end = type(error).__name__
        except Exception as error:  # noqa: BLE001 - logged by tell_failure; a worker that still runs is found again
            tell_failure(f"{self.config.name} cannot be watched, and counts as ended", error)
            self._end = describe(error)
        else:
            self._end = "its loop ended"


class RaySpawner:
    """Starts workers as Ray actors, or finds actors that still run. Implements the interface Spawner."""

    def __init__(
        self,
        namespace: str,
        start_timeout_s: float,
        places: Mapping[str, PlacementGroup],
        dead_after_s: float = CLOSE_GRACE_S,
    ) -> None:
        """Make a spawner for the cluster `namespace`. `start_timeout_s` is the timeout in seconds of a worker's start.
        `places` has Ray's placement group of each group of workers, by group name. Rank N of a group gets bundle N. An
        actor that an earlier supervisor made counts as stopped if it does not answer within `dead_after_s` seconds."""
        self._namespace = namespace
        self._timeout_s = start_timeout_s
        self._places = places
        self._dead_after_s = dead_after_s

    async def start(self, config: WorkerConfig) -> RayWorker:
        """Start a worker with `config`, and return it when it serves. An actor of this worker that already runs is used
        if it has an equal configuration. It is also used if it has another role, and then gets the role of `config`. In
        all other cases it is killed, and a new actor is started.

        Raises WorkerStartError or UnavailableError. UnavailableError is raised at once while no node has room for the
        worker's group.
        """
        await self._require_place(config)
        actor = await self._find(config) or self._make(config)
        return RayWorker(config, actor, await _serve(actor, config, self._timeout_s), self._timeout_s)

    async def _require_place(self, config: WorkerConfig) -> None:
        """Raise UnavailableError if the worker's group has lost its node and Ray has not found another node for it
        yet."""
        group, _ = place_of(config.place_name)
        place = self._places.get(group)
        if place is not None and not await asyncio.to_thread(is_placed, place):
            raise UnavailableError(f"{config.name} waits for a node with room for {group}")

    async def _find(self, config: WorkerConfig) -> "ActorHandle[Any] | None":
        actor = _actor(self._namespace, config.place_name)
        if actor is None:
            return None
        try:
            found: WorkerConfig = await asyncio.wait_for(answer(actor.config.remote()), self._dead_after_s)
            if found == config or found.role != config.role:
                return actor
        except (RayError, TimeoutError) as error:
            logger.info("%s is dead or stopped (%s): a new actor takes its place", config.name, type(error).__name__)
        ray.kill(actor)
        return None

    def _make(self, config: WorkerConfig) -> "ActorHandle[Any]":
        made: Any = ray.remote(WorkerActor).options(
            name=config.place_name,
            namespace=self._namespace,
            lifetime="detached",
            max_restarts=0,
            max_concurrency=_MAX_CALLS,
            **self._room(config),
        )
        try:
            actor: ActorHandle[Any] = made.remote(config)
        except ValueError as error:  # the name still belongs to an actor that is about to end
            raise UnavailableError(f"{config.name}: its former incarnation has not ended yet; retrying") from error
        return actor

    def _room(self, config: WorkerConfig) -> dict[str, Any]:
        """Return the Ray options that determine where the actor runs. The orchestrator runs on its supervisor's node,
        even if that node declares no CPUs. A worker runs in its group's placement group."""
        if config.role == "orchestrator":
            here = ray.get_runtime_context().get_node_id()
            return {"scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False), "num_cpus": 0}
        group, rank = place_of(config.place_name)
        place = self._places[group]
        bundle = PlacementGroupSchedulingStrategy(place, placement_group_bundle_index=rank)
        num_gpus = place.bundle_specs[rank].get("GPU", 0)  # Ray makes only this share visible
        resources = {pool(role_of(group)): 1}
        return {"scheduling_strategy": bundle, "num_cpus": SMALL_CPU, "num_gpus": num_gpus, "resources": resources}


async def _serve(actor: "ActorHandle[Any]", config: WorkerConfig, timeout_s: float) -> Served:
    """Make the actor serve with this configuration. If that fails, kill the actor and raise WorkerStartError or
    UnavailableError."""
    try:
        served: Served = await asyncio.wait_for(answer(actor.serve.remote(config)), timeout_s)
    except BaseException as error:
        ray.kill(actor)
        if isinstance(error, TimeoutError | GetTimeoutError):
            reason = f"{config.name} did not start within {timeout_s:g} s: raise supervision.start_timeout_s"
            raise UnavailableError(reason) from error
        if isinstance(error, RayError):
            raise UnavailableError(f"{config.name} ended before it served: see Ray's logs") from error
        raise
    if served.error:
        ray.kill(actor)
        raise WorkerStartError(f"{config.name}: {served.error}")
    return served


async def end_worker(namespace: str, name: str) -> None:
    """End the worker `name`, which an earlier supervisor started and which this supervisor does not use. Does nothing
    if the worker does not exist."""
    actor = _actor(namespace, name)
    if actor is None:
        return
    with contextlib.suppress(RayError, TimeoutError):  # the actor is killed next in any case
        await asyncio.wait_for(answer(actor.stop.remote()), CLOSE_GRACE_S)
    ray.kill(actor)


def is_placed(place: PlacementGroup) -> bool:
    """Return True if Ray has reserved resources for all workers of a placement group. If the node of a placement group
    fails, this is False until Ray has found another node. Blocks until Ray's control store answers."""
    told: dict[str, Any] = ray.util.placement_group_table(place)
    return bool(told.get("state") == "CREATED")


def pool(role: str) -> str:
    """Return the name of Ray's custom resource for workers of `role`. A node declares one unit of the resource for each
    worker of the role that it can hold."""
    return f"baton_{role}"


def answer(reference: Any) -> Coroutine[Any, Any, Any]:
    """Return a coroutine that waits for the answer to a call of an actor. `reference` is Ray's reference to the answer.
    asyncio's functions accept the coroutine, but not the reference."""

    async def awaited() -> Any:
        return await reference

    return awaited()


def kill_process(pid: int, node_id: str) -> None:
    """Send SIGKILL to the process `pid` on the node `node_id`. Does nothing if the process has ended. If the node is
    another node, a Ray task sends the signal. The function does not wait for the task, because the other node may have
    failed."""
    if node_id == ray.get_runtime_context().get_node_id():
        _kill(pid)
        return
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    ray.remote(_kill).options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(pid)


async def _read_crash(path: str, node_id: str) -> Crash | None:
    """Read a crash note on its node. On another node a Ray task reads it. Raises RayError if that node has failed."""
    if node_id == ray.get_runtime_context().get_node_id():
        return read_crash(path)
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    reading = ray.remote(read_crash).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    crash: Crash | None = await answer(reading.remote(path))
    return crash


def _actor(namespace: str, name: str) -> "ActorHandle[Any] | None":
    try:
        actor: ActorHandle[Any] = ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None
    return actor


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
