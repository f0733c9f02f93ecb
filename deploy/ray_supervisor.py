"""The supervisor: a detached Ray actor that makes all groups and the orchestrator, watches them, and ends them.

It outlives its launcher and is restarted by Ray; a new life adopts what the last one left, and links the chains anew.
Its loop has a thread of its own, started with the actor, so that a restart needs nobody's call.
"""

import asyncio
import contextlib
import logging
import os
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path

import ray
from ray.exceptions import RayError

from baton.clock import SystemClock
from baton.errors import BatonError
from baton.results import ModelInfo
from deploy.chain_links import ChainLinks
from deploy.cluster import Cluster
from deploy.cluster_config import ClusterConfig
from deploy.groups import Heartbeat, Surroundings, WorkerGroup
from deploy.limits import tokens_of_slot
from deploy.ray_orchestrator import OrchestratorKeeper, OrchestratorPlan
from deploy.ray_places import Places, reserve
from deploy.ray_spawner import RaySpawner
from orchestrator.membership import ClusterView

logger = logging.getLogger(__name__)

NAME = "supervisor"
_STOP_S = 60.0
_MAX_REPORTS = 100


@dataclass(frozen=True)
class SupervisorState:
    """What the launcher shows. Replaced as a whole."""

    pid: int
    node_id: str
    phase: str = "starting"
    """starting, running, failed or stopped."""
    reports: tuple[str, ...] = ()
    """Lines for the user, the latest of this life."""
    num_reports: int = 0
    """Lines that there were so far, those no longer in `reports` included."""
    error: str = ""
    """Why it failed, in one line."""
    port: int = 0
    """The orchestrator's."""
    pids: dict[str, int] = field(default_factory=dict)
    """Of the workers, by name."""


class SupervisorActor:
    """Owns the cluster. Its methods run on the actor's threads, all else on the loop's thread."""

    def __init__(self, config: ClusterConfig, folder: Path) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
        self._config = config
        self._folder = folder
        self._state = SupervisorState(os.getpid(), ray.get_runtime_context().get_node_id())
        self._around = Surroundings(
            RaySpawner(config.name, config.supervision.start_timeout_s, {}),
            Heartbeat(config.supervision.heartbeat_s, config.supervision.dead_after_s),
            SystemClock(),
            self._report,
            self._changed,
        )
        self._cluster = Cluster([], [], self._around)
        self._max_tokens = config.generate.max_slot_tokens
        self._keeper: OrchestratorKeeper | None = None
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._main, name="supervisor", daemon=True)
        self._thread.start()

    def state(self) -> SupervisorState:
        """How things stand. Its answer is the supervisor's heartbeat."""
        pids = {worker.name: worker.handle.pid for group in self._groups() for worker in tuple(group.workers.values())}
        return replace(self._state, pids=pids)

    def stop(self) -> None:
        """Ends everything that was made; returns when it is gone."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(_STOP_S)

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._run())
            self._state = replace(self._state, phase="stopped")
        except Exception as error:  # the launcher shows it, whatever it is
            logger.warning("the cluster failed", exc_info=not isinstance(error, BatonError))
            text = str(error) if isinstance(error, BatonError) else f"supervisor: {error!r}: see Ray's logs"
            self._state = replace(self._state, phase="failed", error=text)

    async def _run(self) -> None:
        places: Places = {}
        serving = asyncio.create_task(self._serve(places))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
        finally:
            for task in (serving, stopping):
                task.cancel()
            await asyncio.gather(serving, stopping, return_exceptions=True)
            if self._keeper is not None:
                await self._keeper.close()
            await self._cluster.close()
            for place in places.values():
                ray.util.remove_placement_group(place)

    async def _serve(self, places: Places) -> None:
        await reserve(self._config, places)
        self._around = replace(
            self._around,
            spawner=RaySpawner(self._config.name, self._config.supervision.start_timeout_s, places),
        )
        self._cluster = self._make_cluster()
        self._report(f"starting {self._config.num_workers} workers")
        await self._cluster.start()
        keeper = OrchestratorKeeper(self._plan(), self._view, self._around.heartbeat, self._around.clock)
        self._keeper = keeper
        await keeper.start()
        self._report(f"orchestrator serves on {self._config.orchestrator.host}:{keeper.port}")
        self._state = replace(self._state, phase="running", port=keeper.port)
        await keeper.keep()

    def _make_cluster(self) -> Cluster:
        config, folder = self._config, self._folder
        prefill, generation = [], []
        for index in range(config.prefill.num_groups):
            ranks = [config.worker(folder, "prefill", index, rank) for rank in range(config.prefill.num_ranks)]
            links = ChainLinks(config.worker_host, config.supervision.dead_after_s)
            prefill.append(WorkerGroup(f"prefill-{index}", ranks, self._around, links))
        for index in range(config.generate.num_groups):
            engine = config.worker(folder, "generate", index, 0)
            generation.append(WorkerGroup(f"generate-{index}", [engine], self._around))
        return Cluster(prefill, generation, self._around)

    def _plan(self) -> OrchestratorPlan:
        from modeling.weights import load_config
        from text.tokenizer import Tokenizer

        model = load_config(self._folder)
        self._max_tokens = tokens_of_slot(self._folder, self._config.generate.max_slot_tokens)
        info = ModelInfo(
            name=Path(self._config.model.name).name,
            max_tokens=self._max_tokens,
            vocab_size=model.vocab_size,
            dtype=self._config.model.description,
            has_chat_template=Tokenizer.load(self._folder).has_chat_template,
            layout_fingerprint=self._around.agreement.layout_fingerprint,
        )
        return OrchestratorPlan(self._config, self._folder, info, model.eos_token_ids)

    def _view(self) -> ClusterView:
        return self._cluster.view(self._config.generate.num_slots, self._max_tokens)

    def _groups(self) -> tuple[WorkerGroup, ...]:
        return (*self._cluster.prefill, *self._cluster.generation)

    def _report(self, line: str) -> None:
        logger.info("%s", line)
        reports = (*self._state.reports, line)[-_MAX_REPORTS:]
        self._state = replace(self._state, reports=reports, num_reports=self._state.num_reports + 1)

    def _changed(self) -> None:
        if self._keeper is not None:
            self._keeper.tell()


def end_supervisor(namespace: str) -> None:
    """Stops the supervisor of that namespace, with all that it made. Harmless when there is none."""
    try:
        actor = ray.get_actor(NAME, namespace=namespace)
    except ValueError:
        return
    with contextlib.suppress(RayError):  # it is killed next, whatever it answers
        ray.get(actor.stop.remote(), timeout=_STOP_S)
    ray.kill(actor)
