"""Clusters of supervised groups: `Cluster` has any number of groups and uses any spawner, `LocalCluster` uses child
processes.

A cluster starts its groups at the same time, and describes them to the orchestrator as a view. When it ends, it closes
chains before the engines to which they push KV. Groups may join and leave while it serves (`deploy.groups.roster`
decides which). Runs on the supervisor's asyncio loop. After `close`, no worker process is left.
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
from deploy.machine.calibrations import engine_step_times
from deploy.machine.cluster_plan import ClusterPlan
from orchestrator.membership.members import Membership
from orchestrator.membership.view import ClusterView, GenerationGroup, Orders, PrefillGroup, place_of

logger = logging.getLogger(__name__)

NO_ORDERS = Orders()
"""Orders under which every group has its configured workers."""


class Cluster:
    """Prefill and generation groups that are started, described and ended at the same time. Used once."""

    def __init__(self, prefill: Sequence[WorkerGroup], generation: Sequence[WorkerGroup], around: Surroundings) -> None:
        self.prefill = tuple(prefill)
        self.generation = tuple(generation)
        self._around = around

    @property
    def groups(self) -> tuple[WorkerGroup, ...]:
        """All groups, generation groups first."""
        return (*self.generation, *self.prefill)

    async def start(self) -> None:
        """Start all groups and return when they are ready. If one fails, end all of them and raise the first
        failure."""
        try:
            started = await asyncio.gather(*(group.start() for group in self.groups), return_exceptions=True)
            for failure in started:
                if isinstance(failure, BaseException):
                    raise failure
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End all workers. Ranks end before the engines, because ranks hold connections to engines. A failure does not
        stop the closing of the other groups; the first one is raised at the end. Idempotent."""
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
        """Remove a closed group from the cluster."""
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
        """Check all workers immediately instead of at the next heartbeat, because something failed."""
        for group in self.groups:
            group.suspect()

    def view(self, num_slots: int, max_slot_tokens: int) -> ClusterView:
        """Return the view of the groups for the orchestrator. The arguments are the same for every generation group."""
        return ClusterView(
            prefill=tuple(
                PrefillGroup(
                    name=group.name,
                    endpoints=group.endpoints,
                    epoch=group.links.epoch,
                    ready=group.ready,
                    prefix_store=group.prefix_store,
                    layout_fingerprint=group.layout_fingerprint,
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
    """Make the group of that name without starting it. A prefill chain also gets its links.

    `workers_of` returns the configurations of all workers of a group, in rank order. The group gets those workers that
    the orders do not lend to another group. A group that has borrowed a worker has exactly one worker, which runs in
    the place of the borrowed one.
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
    """Prefill and generation groups as processes of one tree; an async context manager, used once."""

    def __init__(
        self,
        plan: ClusterPlan,
        clock: Clock,
        report: Callable[[str], None] = logger.info,
        *,
        kernels: tuple[KernelChoice, ...] = (),
    ) -> None:
        """Make a cluster that is not started yet. `kernels` are the kernels that the launcher chose."""
        config, supervision = plan.config, plan.config.supervision
        heartbeat = Heartbeat(supervision.heartbeat_s, supervision.dead_after_s)
        spawner, host = ProcessSpawner(supervision.start_timeout_s), config.worker_host or LOOPBACK
        super().__init__([], [], Surroundings(spawner, heartbeat, clock, report, self._tell_members, host=host))
        self.plan = plan
        self.max_tokens = plan.max_tokens
        """Maximum number of tokens, prompt and output, of one request."""
        self.members = Membership(on_failure=self.suspect)
        """The groups as the orchestrator sees them; kept up to date."""
        self.secret = ClusterSecret.new()
        """The secret of this cluster, which every call to its workers must contain."""
        place = WorkerPlace(
            model_folder=plan.model.folder,
            kernels=kernels,
            secret=self.secret.text,
            step_times=engine_step_times(plan),
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
        """The current worker of the first generation group."""
        return self.generation[0].workers[0]

    @property
    def ranks(self) -> tuple[Worker, ...]:
        """The current workers of the prefill ranks, in rank order."""
        return tuple(group.workers[rank] for group in self.prefill for rank in sorted(group.workers))

    def _tell_members(self) -> None:
        self.members.update(self.view(self.plan.config.generate.num_slots, self.max_tokens))
