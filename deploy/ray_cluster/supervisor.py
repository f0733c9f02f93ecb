"""The supervisor: a detached Ray actor that starts all groups of workers and the orchestrator, monitors them, and ends
them.

The supervisor outlives its launcher. Ray restarts it, on another node if its node is lost. After a restart, it takes
over the workers that still run, ends the groups that operators have removed, connects the ranks of each prefill chain
again, and runs the orchestrator on its own node. A step of this restart that fails is retried. Only `stop` ends the
cluster. The supervisor's event loop runs in a thread that starts with the actor. A restarted supervisor therefore
begins to work before any caller has called it.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import ray

from baton.errors import BatonError
from baton.process.backoff import Backoff
from baton.process.clock import SystemClock
from baton.process.endless import T, tell_failure, until_done
from baton.results.completion import ModelInfo
from baton.settings.addresses import join_address
from baton.settings.place import LOOPBACK, WorkerPlace
from baton.transport.identity import ClusterSecret
from baton.types import KernelChoice
from deploy.config.cluster import ClusterConfig
from deploy.groups.cluster import Cluster, group_of
from deploy.groups.group import WorkerGroup
from deploy.groups.keeper import OrchestratorKeeper, OrchestratorPlan
from deploy.groups.roster import Roster
from deploy.groups.spawner import WorkerHandle
from deploy.groups.surroundings import Heartbeat, Surroundings
from deploy.groups.terms import Terms
from deploy.machine.cluster_plan import ClusterPlan
from deploy.machine.model_folder import folder_on_node, require_alike
from deploy.machine.planners import served_planner
from deploy.machine.resolved_model import ResolvedModel
from deploy.options.logs import set_up_logs
from deploy.ray_cluster.interfaces import client_host, serving_host
from deploy.ray_cluster.memory import Address, Memory, RayTermStore, load_memory
from deploy.ray_cluster.places import RayRoom, needs_of
from deploy.ray_cluster.ray_worker import node_address
from deploy.ray_cluster.spawner import RaySpawner, end_worker
from deploy.ray_cluster.supervisor_state import STOP_S, SupervisorState
from orchestrator.membership.view import ClusterView, Orders

logger = logging.getLogger(__name__)

_MAX_REPORTS = 100


class SupervisorActor:
    """Ray actor that owns the cluster. Its methods run on the actor's threads. All other work runs on the thread of the
    supervisor's loop."""

    def __init__(
        self, config: ClusterConfig, folder: Path, kernels: tuple[KernelChoice, ...], store: str, secret: ClusterSecret
    ) -> None:
        """Start the supervisor's loop, which starts the cluster. `folder` is the model's folder on the launcher's node.
        `kernels` are the kernels that were measured as the fastest on the launcher's kind of processor. `store` is the
        name under which workers of one node share files. `secret` is the secret that the cluster's processes share."""
        set_up_logs(logging.INFO, config.log_format)
        self._config = config
        self._folder = folder
        """Model folder on the launcher's node."""
        self._here = ResolvedModel(folder)
        """Model, with its folder on the node on which the supervisor runs now."""
        self._kernels = kernels
        self._store = store
        self._secret = secret
        self._state = SupervisorState(os.getpid(), ray.get_runtime_context().get_node_id())
        own_host = config.worker_host or (node_address() if config.ray.address else LOOPBACK)
        self._room = RayRoom(
            config.supervision.start_timeout_s,
            needs_of(config.node_labels, {}, config.gpu_shares),
            node_wait_s=config.ray.node_wait_s,
            across_nodes=config.prefill.across_nodes,
            report=self._report,
        )
        limits = config.supervision
        self._around = Surroundings(
            RaySpawner(config.name, limits.start_timeout_s, self._room.places, limits.dead_after_s),
            Heartbeat(limits.heartbeat_s, limits.dead_after_s),
            SystemClock(),
            self._report,
            self._changed,
            room=self._room,
            terms=Terms(RayTermStore(config.name)),
            host=own_host,
        )
        self._sizes = config.group_sizes
        self._memory = Memory(Orders())
        """State that is stored in Ray, and that the supervisor reads again after a restart."""
        self._cluster = Cluster([], [], self._around)
        self._roster = Roster(self._cluster, self._sizes, self._make_group, self._around)
        self._max_tokens = config.generate.max_slot_tokens
        self._keeper: OrchestratorKeeper | None = None
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._main, name="supervisor", daemon=True)
        self._thread.start()

    def state(self) -> SupervisorState:
        """Return the state of the cluster. Callers also use the answer as the supervisor's heartbeat."""
        pids = {
            worker.name: worker.handle.pid for group in self._cluster.groups for worker in tuple(group.workers.values())
        }
        return replace(self._state, pids=pids)

    def stop(self) -> None:
        """End all groups of workers and the orchestrator. Returns when they have ended."""
        self._state = replace(self._state, phase="stopping")
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(STOP_S)

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._run())
            self._state = replace(self._state, phase="stopped")
        except Exception as error:  # the launcher shows any error
            logger.warning("the cluster failed", exc_info=not isinstance(error, BatonError))
            text = str(error) if isinstance(error, BatonError) else f"supervisor: {error!r}: see Ray's logs"
            self._state = replace(self._state, phase="failed", error=text)

    async def _run(self) -> None:
        serving = asyncio.create_task(self._serve())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
                await stopping
        finally:
            for task in (serving, stopping):
                task.cancel()
            await asyncio.gather(serving, stopping, return_exceptions=True)
            if self._keeper is not None:
                await self._keeper.close()
            else:
                await end_worker(self._config.name, self._config.orchestrator_worker(self._folder, self._secret).name)
            await self._roster.close()
            await self._cluster.close()
            for name in (*self._sizes, *self._memory.orders.stand_ins):  # also of groups that were being started
                await self._room.release(name)

    async def _serve(self) -> None:
        """Make the cluster serve. On the first start, raises the first failure. After a restart, when workers serve
        already, each step is retried until it succeeds."""
        before = await self._until_done("reading the cluster's memory", self._load_memory)
        if before is None:
            await self._serve_first()
            return
        self._memory = before
        self._set_needs()
        await self._roster.adopt(before.orders, self._config.supervision.dead_after_s)  # late groups join later
        await self._until_done("saving the cluster's memory", self._save_layout)
        keeper, model = await self._until_done("starting the orchestrator", self._find_orchestrator)
        await self._until_done("saving the orchestrator's address", partial(self._serves, keeper, model))

    async def _serve_first(self) -> None:
        if self._config.ray.address:
            model = await asyncio.to_thread(self._model_here, "")
            asked = await asyncio.to_thread(ClusterPlan(self._config, model).worker_bytes)
            self._memory = replace(self._memory, worker_bytes=asked)
        self._set_needs()
        process = await self._start_all()
        await self._save_layout()
        await self._serves(*await self._start_orchestrator(process))

    async def _until_done(self, what: str, step: Callable[[], Awaitable[T]]) -> T:
        heartbeat = self._around.heartbeat
        return await until_done(what, step, Backoff(heartbeat.interval_s, heartbeat.dead_after_s), self._report)

    async def _load_memory(self) -> Memory | None:
        return load_memory(self._config.name)

    def _set_needs(self) -> None:
        self._room.needs = needs_of(self._config.node_labels, self._memory.worker_bytes, self._config.gpu_shares)

    async def _save_layout(self) -> None:
        if self._cluster.groups:  # if all groups have left, the layout from before the restart still holds
            self._memory = replace(self._memory, layout_fingerprint=self._cluster.groups[0].layout_fingerprint)
        self._memory.save(self._config.name)

    async def _find_orchestrator(self) -> tuple[OrchestratorKeeper, ModelInfo]:
        """Find the orchestrator that ran before the supervisor's restart, or start a new one."""
        await self._find_model()
        return await self._start_orchestrator(None)

    async def _start_orchestrator(self, process: WorkerHandle | None) -> tuple[OrchestratorKeeper, ModelInfo]:
        """Make the orchestrator in `process` serve clients. If `process` is None, use a running orchestrator process or
        start one. Return the orchestrator's keeper, and the model that it serves. Raises the orchestrator's error if it
        cannot serve."""
        plan = self._plan()
        self._keeper = keeper = OrchestratorKeeper(plan, self._view, self._around)
        keeper.orders, keeper.follow = self._memory.orders, self._follow
        await keeper.start(process)
        return keeper, plan.model

    async def _serves(self, keeper: OrchestratorKeeper, model: ModelInfo) -> None:
        """Save and report the orchestrator's current address, and its model."""
        endpoint = join_address(client_host(self._config.orchestrator.host), keeper.ports[0])
        self._memory = replace(self._memory, address=Address(endpoint, self._state.node_id, keeper.ports))
        self._memory.save(self._config.name)
        self._report(f"orchestrator serves on {endpoint}")
        self._state = replace(self._state, phase="running", endpoint=endpoint, model=model)

    async def _start_orchestrator_process(self) -> WorkerHandle:
        """Start the orchestrator's process, which does not serve clients yet. Raises the process's error if it does not
        start."""
        await self._find_model()  # first: workers start slower, and get Ray's idle processes
        return await self._around.spawner.start(self._config.orchestrator_worker(self._folder, self._secret))

    async def _find_model(self) -> None:
        """Find the model's folder on this node. Raises ModelError."""
        self._here = await asyncio.to_thread(self._model_here, "")

    async def _start_all(self) -> WorkerHandle:
        """Start all groups of the cluster for the first time; if one fails, end all of them. At the same time start the
        orchestrator's process, and return it. Raises the first failure; then the orchestrator's process is ended,
        too."""
        await self._room.reserve_all(self._sizes)
        self._report(f"starting {self._config.num_workers} workers")
        for name in self._sizes:
            self._cluster.add(self._make_group(name, Orders()))
        starting = asyncio.create_task(self._start_orchestrator_process())
        try:
            await self._cluster.start()
            return await starting
        except BaseException:
            starting.cancel()
            (process,) = await asyncio.gather(starting, return_exceptions=True)
            if not isinstance(process, BaseException):
                await process.close()
            raise

    def _make_group(self, name: str, orders: Orders) -> WorkerGroup:
        """Make a group that is not started yet. Implements deploy.groups.roster.MakeGroup."""
        model = orders.models.get(name, "")
        if model:
            require_alike(self._model_here(model), self._model_here(""))
        folder = Path(model) if model else self._folder
        place = WorkerPlace(
            model_folder=folder,
            model=model,
            host="" if self._config.ray.address else LOOPBACK,
            cluster=self._store,
            kernels=self._kernels,
            secret=self._secret.text,
        )
        return group_of(name, partial(self._config.workers, place=place), self._around, orders)

    def _model_here(self, model: str) -> ResolvedModel:
        """Return the model with its folder on this node. `model` is the argument of `baton reload`; empty: the
        configured model. Blocks. Raises ModelError."""
        place = self._config.orchestrator_worker(self._folder, self._secret).place
        asked = replace(place, model=model, model_folder=Path(model)) if model else place
        return ResolvedModel(folder_on_node(asked))

    def _follow(self, orders: Orders) -> Orders:
        """Save and carry out the operators' orders. The orchestrator sends them with each heartbeat. Return the orders
        that were saved."""
        if orders != self._memory.orders:
            memory = replace(self._memory, orders=orders)
            try:
                memory.save(self._config.name)
            except Exception as error:  # noqa: BLE001 - logged by tell_failure; the orders come again with the next heartbeat
                tell_failure("orders were not stored; retrying", error, self._report)
                return self._memory.orders
            self._memory = memory
        self._roster.follow(orders)
        return orders

    def _plan(self) -> OrchestratorPlan:
        plan = ClusterPlan(self._config, self._here)
        self._max_tokens = plan.max_tokens
        info = ModelInfo(
            name=Path(self._config.model.name).name,
            max_tokens=self._max_tokens,
            vocab_size=plan.model.config.vocab_size,
            dtype=self._config.model.description,
            has_chat_template=False,  # set by the orchestrator, which has the tokenizer
            layout_fingerprint=self._memory.layout_fingerprint,
        )
        section, before = self._config.orchestrator, self._memory.address
        configured = (section.port, None if section.metrics_port < 0 else section.metrics_port)
        return OrchestratorPlan(
            self._config.orchestrator_worker(self._folder, self._secret),
            info,
            plan.model.config.eos_token_ids,
            partial(served_planner, plan),
            serving_host(self._config.orchestrator.host),
            before.ports if before is not None and before.node_id == self._state.node_id else configured,
            self._config.supervision.start_timeout_s,
        )

    def _view(self) -> ClusterView:
        view = self._cluster.view(self._config.generate.num_slots, self._max_tokens)
        return replace(view, absent=self._roster.absent)

    def _report(self, line: str) -> None:
        logger.info("%s", line)
        reports = (*self._state.reports, line)[-_MAX_REPORTS:]
        self._state = replace(self._state, reports=reports, num_reports=self._state.num_reports + 1)

    def _changed(self) -> None:
        if self._keeper is not None:
            self._keeper.tell()
