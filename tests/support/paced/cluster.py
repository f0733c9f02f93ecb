"""A supervised cluster of paced workers. Each worker and the orchestrator are separate processes.

Groups start and end as ordered (`baton scale`, `baton drain`): as in `baton serve`, the roster follows the orders that
each heartbeat of the orchestrator returns. The start of a group takes a configured time.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.planning.planner import ChainPlanner
from baton.process.clock import Clock
from deploy.config.cluster import ClusterConfig
from deploy.config.file import WrittenConfig
from deploy.config.worker import WorkerConfig
from deploy.groups.processes import ProcessSpawner
from deploy.groups.spawner import Spawner, WorkerHandle
from orchestrator.membership.view import Orders
from tests.support.clusters.clients import CLOCK
from tests.support.clusters.kept import KeptCluster, kept
from tests.support.paced.hardware import PacedHardware

_START_S = 120.0


@dataclass(frozen=True)
class PacedPlan:
    """Configuration of a paced cluster."""

    start: tuple[int, int]
    """Numbers of prefill and generation groups at the start."""
    most: tuple[int, int] | None = None
    """Maximum numbers of groups of each role that may be ordered; None: as at the start."""
    num_ranks: int = 1
    num_slots: int = 16
    max_tokens: int = 32_768
    """Limit on the tokens of a request, prompt and output together."""
    cold_start_s: float = 0.0
    """Minimum time in seconds from an order until the group serves. The groups of the start are available at once."""
    flip_s: float = 1.0
    """Simulated duration of a change of role in seconds."""
    orchestrator: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the orchestrator's section in the cluster's configuration."""
    sections: Mapping[str, Any] = field(default_factory=dict)
    """Further sections of the cluster's configuration."""

    @property
    def names(self) -> frozenset[str]:
        """Return the names of the groups at the start."""
        return frozenset(
            f"{role}-{number}"
            for role, num_groups in zip(("prefill", "generate"), self.start, strict=True)
            for number in range(num_groups)
        )

    def config(self, folder: Path) -> ClusterConfig:
        """Return the configuration of all groups that may be ordered."""
        num_prefill, num_generate = self.most or self.start
        return WrittenConfig(
            {
                "model": {"name": str(folder), "dtype": "float32"},
                "prefill": {"num_groups": num_prefill, "num_ranks": self.num_ranks, "prefix_share": 0.0},
                "generate": {
                    "num_groups": num_generate,
                    "num_slots": self.num_slots,
                    "max_slot_tokens": self.max_tokens,
                    "num_threads": 1,
                    "speculation": "off",
                },
                "orchestrator": {"port": 0, **self.orchestrator},
                **self.sections,
            }
        ).local.config


class ColdSpawner:
    """Wrapper of a spawner whose starts take at least the time of a cold start. Implements Spawner."""

    def __init__(self, inner: Spawner, clock: Clock) -> None:
        self.cold_start_s = 0.0
        """Cold start time in seconds of workers started from now on."""
        self._inner, self._clock = inner, clock

    async def start(self, config: WorkerConfig) -> WorkerHandle:
        due_s = self._clock.now_s() + self.cold_start_s
        worker = await self._inner.start(config)
        try:
            await asyncio.sleep(due_s - self._clock.now_s())
        except BaseException:
            worker.kill()
            await worker.wait()
            raise
        return worker


@dataclass(frozen=True)
class Allocation:
    """Numbers of groups of each role since a point in time."""

    since_s: float
    num_ready: tuple[int, int]
    num_paid: int
    """Number of groups of both roles, including groups that are starting."""


@dataclass(kw_only=True)
class PacedCluster(KeptCluster):
    """A running paced cluster, created by `paced_cluster`."""

    plan: PacedPlan
    hardware: PacedHardware
    history: list[Allocation] = field(default_factory=list)
    """Changes of the numbers of groups, with times on the clock's now_s."""

    def group_s(self, start_s: float, end_s: float) -> float:
        """Return the total of group-seconds between two points in time of the clock. Groups that are starting count,
        too."""
        total_s = 0.0
        for index, each in enumerate(self.history):
            until_s = self.history[index + 1].since_s if index + 1 < len(self.history) else end_s
            total_s += each.num_paid * max(min(until_s, end_s) - max(each.since_s, start_s), 0.0)
        return total_s

    def make_planner(self) -> ChainPlanner:
        return self.hardware.planner(max_ranks=self.plan.num_ranks)

    def tell(self) -> None:
        roles = self.cluster.prefill, self.cluster.generation
        num_ready = tuple(sum(group.ready for group in groups) for groups in roles)
        starting = sum(group.starts for group in self.roster.absent)
        num_paid = len(self.cluster.groups) + starting
        self.history.append(Allocation(CLOCK.now_s(), (num_ready[0], num_ready[1]), num_paid))
        super().tell()


@asynccontextmanager
async def paced_cluster(folder: Path, hardware: PacedHardware, plan: PacedPlan) -> AsyncIterator[PacedCluster]:
    """Run a paced cluster that serves the model in `folder`."""
    config, spawner = plan.config(folder), ColdSpawner(ProcessSpawner(_START_S, "tests.support.paced.worker"), CLOCK)
    away = frozenset(config.group_sizes) - plan.names
    made = PacedCluster(
        config=config,
        folder=folder,
        orders=Orders(drained=away, leaving=away),
        processes=spawner,
        plan=plan,
        hardware=hardware,
    )
    async with kept(made):
        spawner.cold_start_s = plan.cold_start_s
        yield made
