"""Clusters of child processes, configured as for `baton serve`. The orchestrator's process is replaced when it ends or
stops sending heartbeats."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from baton.modeling.checkpoints.weights import load_config
from baton.modeling.kernels.process_kernels import KERNELS
from baton.planning.planner import ChainPlanner
from baton.results.completion import ModelInfo
from baton.settings.addresses import join_address
from baton.settings.place import LOOPBACK, WorkerPlace
from baton.transport.channel import make_channel
from deploy.config.cluster import ClusterConfig
from deploy.groups.keeper import OrchestratorKeeper, OrchestratorPlan
from deploy.groups.processes import ProcessSpawner
from deploy.groups.surroundings import Heartbeat
from deploy.machine.cluster_plan import ClusterPlan
from deploy.machine.planners import served_planner
from deploy.machine.resolved_model import ResolvedModel
from orchestrator.membership.view import Orders
from tests.support.clusters.supervision import SupervisedCluster
from tests.support.wire.secret import SECRET


@dataclass(kw_only=True)
class KeptCluster(SupervisedCluster):
    """Cluster of supervised child processes. Its orchestrator is a child process, too, and sends orders with its
    heartbeats."""

    config: ClusterConfig
    """Configuration of all groups that orders may name."""
    folder: Path
    """Model folder."""
    orders: Orders = field(default_factory=Orders)
    """Orders at the start. A group that these orders end is not started."""
    keeper: OrchestratorKeeper | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        config, supervision = self.config, self.config.supervision
        self.names = tuple(config.group_sizes)
        self.num_slots = config.generate.num_slots
        self.host = config.worker_host or LOOPBACK
        self.cluster_plan = ClusterPlan(config, ResolvedModel(self.folder))
        self.max_tokens = self.cluster_plan.max_tokens
        self.heartbeat = Heartbeat(supervision.heartbeat_s, supervision.dead_after_s)
        self.processes = self.processes or ProcessSpawner(supervision.start_timeout_s)
        place = WorkerPlace(model_folder=self.folder, kernels=(KERNELS.choice,), secret=SECRET.text)
        self.workers_of = lambda name, _: config.workers(name, place)
        super().__post_init__()

    @property
    def target(self) -> str:
        assert self.keeper is not None
        return join_address(self.config.orchestrator.host, self.keeper.ports[0])

    def make_planner(self) -> ChainPlanner:
        """Return the planner for all incarnations (processes) of the orchestrator."""
        return served_planner(self.cluster_plan)

    def tell(self) -> None:
        if self.keeper is not None:
            self.keeper.tell()

    async def start(self) -> None:
        """Start all groups except the ones that the first orders end, then the orchestrator."""
        for name in self.names:
            if name not in self.orders.leaving:
                self.cluster.add(self.make(name, Orders()))
        await self.cluster.start()
        self.roster.follow(self.orders)
        around = replace(self.around, spawner=ProcessSpawner(self.config.supervision.start_timeout_s))
        self.keeper = OrchestratorKeeper(self._orchestrator(), self.view, around)
        self.keeper.orders, self.keeper.follow = self.orders, self._follow
        await self.keeper.start()
        await self.cluster.until_ready(self.config.supervision.start_timeout_s)

    async def close(self) -> None:
        if self.keeper is not None:
            await self.keeper.close()
        await super().close()

    def _orchestrator(self) -> OrchestratorPlan:
        model, layout = load_config(self.folder), self.cluster.generation[0].layout_fingerprint
        dtype = self.config.model.dtype
        return OrchestratorPlan(
            self.config.orchestrator_worker(self.folder, SECRET),
            ModelInfo(self.folder.name, self.max_tokens, model.vocab_size, dtype, False, layout),
            model.eos_token_ids,
            self.make_planner,
            self.config.orchestrator.host,
            ports=(0, 0),
        )

    def _follow(self, orders: Orders) -> Orders:
        self.roster.follow(orders)
        return orders


@asynccontextmanager
async def kept(made: KeptCluster) -> AsyncIterator[None]:
    """Run the cluster, and connect to its orchestrator."""
    try:
        await made.start()
        async with make_channel(made.target, secret=SECRET) as channel:
            made.connect(channel)
            yield
    finally:
        await made.close()
