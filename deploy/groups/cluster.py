"""Clusters of supervised worker groups. `Cluster` has any number of groups and uses any spawner. `LocalCluster` uses
child processes.

A cluster starts its groups at the same time, and reports their state to the orchestrator as a ClusterView. When it
ends, it closes prefill chains before the engines to which they push KV. Groups may be added and removed while the
cluster serves; `deploy.groups.roster` decides about this. Runs on the supervisor's asyncio loop. After `close`, no
worker process is left.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from baton.errors import UnavailableError
from baton.process.clock import Clock
from baton.settings.place import LOOPBACK, WorkerPlace
from baton.transport.identity import ClusterSecret
from baton.types import KernelChoice
from deploy.config.worker import WorkerConfig
from deploy.groups.chain_links import ChainLinks
from deploy.groups.group import WorkerGroup
from deploy.groups.processes import ProcessSpawner
from deploy.groups.surroundings import Heartbeat, Surroundings
from deploy.groups.worker import Worker
from deploy.machine.cluster_plan import ClusterPlan
from orchestrator.membership.members import Membership
from orchestrator.membership.view import ClusterView, GenerationGroup, Orders, PrefillGroup, place_of

logger = logging.getLogger(__name__)

NO_ORDERS = Orders()
"""Empty set of operators' orders. With it, every group has its configured workers."""


class Cluster:
    """Prefill and generation groups that are started at the same time and ended together. An object is used only
    once."""

    def __init__(self, prefill: Sequence[WorkerGroup], generation: Sequence[WorkerGroup], around: Surroundings) -> None:
        self.prefill = tuple(prefill)
        self.generation = tuple(generation)
        self._around = around

    @property
    def groups(self) -> tuple[WorkerGroup, ...]:
        """All groups, generation groups first."""
        return (*self.generation, *self.prefill)

    async def start(self) -> None:
        """Start all groups, and return when they are ready. If a group fails to start, end all groups and raise the
        first failure."""
        try:
            started = await asyncio.gather(*(group.start() for group in self.groups), return_exceptions=True)
            for failure in started:
                if isinstance(failure, BaseException):
                    raise failure
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End all workers. Prefill ranks are ended before the engines, because ranks hold connections to engines. If
        closing a group fails, the other groups are still closed, and the first failure is raised at the end.
        Idempotent."""
        outcomes: list[BaseException | None] = []
        for groups in (self.prefill, self.generation):
            outcomes += await asyncio.gather(*(group.close() for group in groups), return_exceptions=True)
        for failure in outcomes:
            if failure is not None:
                raise failure

    def add(self, group: WorkerGroup) -> None:
        """Add a started group to the cluster."""
        if group.links is not None:
            self.prefill = tuple(sorted((*self.prefill, group), key=_by_number))
        else:
            self.generation = tuple(sorted((*self.generation, group), key=_by_number))

    def remove(self, group: WorkerGroup) -> None:
        """Remove a group from the cluster. This does not end the group's workers."""
        self.prefill = tuple(each for each in self.prefill if each is not group)
        self.generation = tuple(each for each in self.generation if each is not group)

    async def until_ready(self, timeout_s: float) -> None:
        """Wait until all groups are ready at the same time. Raises UnavailableError after `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                while unready := next((group for group in self.groups if not group.ready), None):
                    await unready.until_ready()  # meanwhile another group may have become unready: look again
        except TimeoutError as error:
            raise UnavailableError(f"the workers have not been ready for {timeout_s:g} s: see their output") from error

    def suspect(self) -> None:
        """Check all workers immediately instead of at the next heartbeat. Called when a call to a worker has failed."""
        for group in self.groups:
            group.suspect()

    def view(self, num_slots: int, max_slot_tokens: int) -> ClusterView:
        """Return the state of all groups, to be sent to the orchestrator. `num_slots` and `max_slot_tokens` are the
        same for every generation group."""
        return ClusterView(
            prefill=tuple(
                PrefillGroup(
                    name=group.name,
                    endpoints=group.endpoints,
                    epoch=group.links.epoch,
                    ready=group.ready,
                    prefix_store=group.prefix_store,
                    layout_fingerprint=group.layout_fingerprint,
                    profile=group.profile,
                )
                for group in self.prefill
                if group.endpoints and group.links is not None
            ),
            generation=tuple(
                GenerationGroup(
                    name=group.name,
                    endpoint=group.endpoints[0],
                    layout_fingerprint=group.layout_fingerprint,
                    num_slots=num_slots,
                    max_slot_tokens=max_slot_tokens,
                    ready=group.ready,
                    prefix_store=group.prefix_store,
                    residency=group.residency,
                    is_approximate=group.is_approximate,
                    profile=group.profile,
                )
                for group in self.generation
                if group.endpoints
            ),
            ended=self._around.ended.recent(self._around.clock.now_s()),
        )


def group_of(
    name: str,
    workers_of: Callable[[str], Sequence[WorkerConfig]],
    around: Surroundings,
    orders: Orders = NO_ORDERS,
) -> WorkerGroup:
    """Create the group `name` without starting it. A prefill chain also gets its ChainLinks.

    `workers_of` returns the configurations of all workers of a group, in rank order. Workers that `orders` lend to
    another group are not part of the created group. If `orders` lend a worker of another group to the created group,
    the created group has exactly one worker, which runs in the process of the lent worker.
    """
    workers = workers_of(name)
    links = ChainLinks(around.host, around.heartbeat.dead_after_s) if workers[0].role == "prefill" else None
    if name in orders.lent:
        lender, rank = place_of(orders.lent[name])
        home = workers_of(lender)
        return WorkerGroup(name, [workers[0].in_place_of(home[rank])], around, links, room=(lender, len(home)))
    kept = [worker for worker in workers if worker.rank not in orders.borrowers(name)]
    return WorkerGroup(name, kept, around, links, room=(name, len(workers)))


def _by_number(group: WorkerGroup) -> tuple[int, str]:
    """Return a key that sorts generate-10 after generate-9."""
    return len(group.name), group.name


class LocalCluster(Cluster):
    """Prefill and generation groups whose workers are child processes of this process. Use it as an async context
    manager, and only once."""

    def __init__(
        self,
        plan: ClusterPlan,
        clock: Clock,
        report: Callable[[str], None] = logger.info,
        *,
        kernels: tuple[KernelChoice, ...] = (),
    ) -> None:
        """Create a cluster without starting it. `report` is called with lines of text for the user. `kernels` are the
        kernels that the launcher chose."""
        config, supervision = plan.config, plan.config.supervision
        heartbeat = Heartbeat(supervision.heartbeat_s, supervision.dead_after_s)
        spawner, host = ProcessSpawner(supervision.start_timeout_s), config.worker_host or LOOPBACK
        super().__init__([], [], Surroundings(spawner, heartbeat, clock, report, self._tell_members, host=host))
        self.plan = plan
        self.max_tokens = plan.max_tokens
        """Maximum number of tokens of one request, prompt and output together."""
        self.members = Membership(on_failure=self.suspect)
        """Current state of the groups, from which the orchestrator chooses groups. It is kept up to date."""
        self.secret = ClusterSecret.new()
        """Secret of this cluster. Every call to its workers must contain it."""
        place = WorkerPlace(
            model_folder=plan.model.folder,
            kernels=kernels,
            secret=self.secret.text,
        )
        for name in config.group_sizes:
            self.add(group_of(name, partial(config.workers, place=place), self._around))

    async def __aenter__(self) -> "LocalCluster":
        self._around.report(f"starting {self.plan.config.num_workers} workers")
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    @property
    def engine(self) -> Worker:
        """Current worker of the first generation group."""
        return self.generation[0].workers[0]

    @property
    def ranks(self) -> tuple[Worker, ...]:
        """Current workers of the prefill ranks, in rank order."""
        return tuple(group.workers[rank] for group in self.prefill for rank in sorted(group.workers))

    def _tell_members(self) -> None:
        self.members.update(self.view(self.plan.config.generate.num_slots, self.max_tokens))
