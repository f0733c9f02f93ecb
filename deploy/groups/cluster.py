"""Clusters of supervised groups: any number of them over any spawner, and the local relay's two over child processes.

A cluster starts its groups together, tells what they are as a view for the orchestrator, and ends chains before the
engines that they push to. Groups may join and leave while it serves (`deploy.groups.roster` says which). Runs on the
supervisor's asyncio loop; leaves no worker behind.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from baton.clock import Clock
from baton.errors import UnavailableError
from baton.ids import Epoch
from deploy.config.worker import LocalConfig
from deploy.groups.chain_links import ChainLinks
from deploy.groups.group import Heartbeat, Surroundings, WorkerGroup
from deploy.groups.processes import ProcessSpawner
from deploy.groups.worker import Worker
from deploy.machine.limits import tokens_of_slot
from orchestrator.membership.members import ClusterView, GenerationGroup, Members, PrefillGroup

logger = logging.getLogger(__name__)


class Cluster:
    """Prefill and generation groups that are started, viewed and ended together. Used once."""

    def __init__(self, prefill: Sequence[WorkerGroup], generation: Sequence[WorkerGroup], around: Surroundings) -> None:
        self.prefill = tuple(prefill)
        self.generation = tuple(generation)
        self._around = around

    @property
    def groups(self) -> tuple[WorkerGroup, ...]:
        """Of both roles."""
        return (*self.generation, *self.prefill)

    async def start(self) -> None:
        """Returns when all groups are ready. Raises the first failure, when nothing is left running."""
        try:
            started = await asyncio.gather(*(group.start() for group in self.groups), return_exceptions=True)
            for failure in started:
                if isinstance(failure, BaseException):
                    raise failure
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Ends all workers, ranks before the engines, to which they hold connections. Raises the first failure once all
        groups have been closed as far as they can be. Idempotent."""
        outcomes: list[BaseException | None] = []
        for groups in (self.prefill, self.generation):
            outcomes += await asyncio.gather(*(group.close() for group in groups), return_exceptions=True)
        for failure in outcomes:
            if failure is not None:
                raise failure

    def add(self, group: WorkerGroup) -> None:
        """A started group is one of the cluster's from now on."""
        if group.links is not None:
            self.prefill = tuple(sorted((*self.prefill, group), key=_by_number))
        else:
            self.generation = tuple(sorted((*self.generation, group), key=_by_number))

    def remove(self, group: WorkerGroup) -> None:
        """A closed group is none of the cluster's any more."""
        self.prefill = tuple(each for each in self.prefill if each is not group)
        self.generation = tuple(each for each in self.generation if each is not group)

    async def until_ready(self, timeout_s: float) -> None:
        """Returns when all groups are ready, at once; UnavailableError after `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                while unready := next((group for group in self.groups if not group.ready), None):
                    await unready.until_ready()  # meanwhile another may have ceased to be: look again
        except TimeoutError as error:
            raise UnavailableError(f"the workers have not been ready for {timeout_s:g} s: see their output") from error

    def suspect(self) -> None:
        """Something failed: all workers are looked at now."""
        for group in self.groups:
            group.suspect()

    def view(self, num_slots: int, max_slot_tokens: int) -> ClusterView:
        """What the orchestrator needs to know; the arguments are each generation group's."""
        return ClusterView(
            prefill=tuple(
                PrefillGroup(
                    name=group.name,
                    endpoints=group.endpoints,
                    epoch=group.links.epoch,
                    ready=group.ready,
                    prefix_store=group.prefix_store,
                    layout_fingerprint=group.layout_fingerprint,
                    processors=group.processors,
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
                    processors=group.processors,
                )
                for group in self.generation
                if group.endpoints
            ),
        )


def _by_number(group: WorkerGroup) -> tuple[int, str]:
    """generate-10 comes after generate-9."""
    return len(group.name), group.name


class LocalCluster:
    """Prefill ranks and a generation engine as processes of one tree; an async context manager, used once."""

    def __init__(self, config: LocalConfig, clock: Clock, report: Callable[[str], None] = logger.info) -> None:
        self.config = config
        self.max_tokens = tokens_of_slot(config.model_folder, config.max_slot_tokens)
        """Of one request, prompt and output."""
        self.members = Members()
        """What an orchestrator needs to know; kept up to date."""
        heartbeat = Heartbeat(config.heartbeat_s, config.dead_after_s)
        spawner = ProcessSpawner(config.start_timeout_s)
        self._around = Surroundings(spawner, heartbeat, clock, report, changed=self._tell_members)
        self._links = ChainLinks(config.host, config.dead_after_s)
        ranks = [config.worker("prefill", rank) for rank in range(config.num_ranks)]
        chain = WorkerGroup("prefill-0", ranks, self._around, self._links)
        engine = WorkerGroup("generate-0", [config.worker("generate", 0)], self._around)
        self._cluster = Cluster([chain] if ranks else [], [engine], self._around)

    async def __aenter__(self) -> "LocalCluster":
        self._around.report(f"starting {self.config.num_ranks + 1} workers")
        await self._cluster.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._cluster.close()

    @property
    def epoch(self) -> Epoch:
        """Of the chain's links."""
        return self._links.epoch

    @property
    def generation(self) -> Worker:
        """The generation engine, in its present life."""
        return self._cluster.generation[0].workers[0]

    @property
    def ranks(self) -> tuple[Worker, ...]:
        """The prefill ranks, in their present lives, in rank order."""
        return tuple(group.workers[rank] for group in self._cluster.prefill for rank in range(self.config.num_ranks))

    async def until_ready(self, timeout_s: float) -> None:
        """Returns when all workers serve and the chain has links; UnavailableError after `timeout_s` seconds."""
        await self._cluster.until_ready(timeout_s)

    def suspect(self) -> None:
        """Something failed: the workers are looked at now, not at the next heartbeat."""
        self._cluster.suspect()

    def _tell_members(self) -> None:
        self.members.update(self._cluster.view(self.config.num_slots, self.max_tokens))
