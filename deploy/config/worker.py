"""Settings of one worker. The process that starts a worker passes them to it."""

from dataclasses import replace
from typing import Literal

from baton.settings.base import settings
from baton.settings.place import WorkerPlace
from generate_workers.config import EngineConfig
from orchestrator.requests.config import OrchestratorConfig
from prefill_workers.config import PrefillConfig

Role = Literal["prefill", "generate", "orchestrator"]
Section = PrefillConfig | EngineConfig | OrchestratorConfig


@settings
class WorkerConfig:
    """Configuration of one worker: its role and number, where it runs, and the settings of its role. The worker's
    process reads the configuration as one line of JSON."""

    role: Role
    group: int
    """Number of the worker's group among the groups of its role."""
    rank: int
    """Rank in the prefill group; 0 for other roles."""
    place: WorkerPlace
    section: Section
    """Settings of the role."""
    lent: str = ""
    """Name of a worker that a group of the other role has lent to this worker's group. This worker runs in the lent
    worker's process, on its node and cores. Empty: this worker has its own process."""

    @property
    def group_name(self) -> str:
        """Name of the worker's group: its role and its number, for example prefill-0."""
        return f"{self.role}-{self.group}"

    @property
    def place_name(self) -> str:
        """Name of the worker whose node, cores and process this worker uses: the worker `lent` if it is set, else this
        worker itself."""
        return self.lent or self.name

    def in_place_of(self, home: "WorkerConfig") -> "WorkerConfig":
        """Return a copy of this configuration for running in the process and on the cores of another worker. `home` is
        the configuration of that worker, which a group of the other role has lent to this worker's group."""
        cores, num_threads = home.place.cores, self.place.num_threads
        if cores:
            num_threads = min(num_threads or len(cores), len(cores))
        return replace(self, lent=home.name, place=replace(self.place, cores=cores, num_threads=num_threads))

    @property
    def name(self) -> str:
        """Name of the worker. A generation engine has the name of its group. A rank of a prefill chain has the name
        GROUP.RANK, for example prefill-0.1. The orchestrator has the name "orchestrator"."""
        if self.role == "orchestrator":
            return self.role
        return f"{self.group_name}.{self.rank}" if self.role == "prefill" else self.group_name
