"""Settings of one worker, as its launcher passes them to its process."""

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
    """Configuration of one worker: its role and number, where it runs, and the settings of its role. Its process
    reads it as one line of JSON."""

    role: Role
    group: int
    """Number of the worker's group among the groups of its role."""
    rank: int
    """Rank in the prefill group; 0 for other roles."""
    place: WorkerPlace
    section: Section
    """Settings of the role."""
    lent: str = ""
    """Name of the lent worker whose node, cores and process this one uses; empty: it uses its own."""

    @property
    def group_name(self) -> str:
        """Name of the worker's group: ROLE-GROUP."""
        return f"{self.role}-{self.group}"

    @property
    def place_name(self) -> str:
        """Name of the worker that owns the place where this one runs: its own name, or that of the lent worker."""
        return self.lent or self.name

    def in_place_of(self, home: "WorkerConfig") -> "WorkerConfig":
        """Return this configuration for the process of `home`, a worker that its group has lent, on that worker's
        cores."""
        cores, num_threads = home.place.cores, self.place.num_threads
        if cores:
            num_threads = min(num_threads or len(cores), len(cores))
        return replace(self, lent=home.name, place=replace(self.place, cores=cores, num_threads=num_threads))

    @property
    def name(self) -> str:
        """Name of the worker: its group's name, followed by .RANK in a chain, or "orchestrator"."""
        if self.role == "orchestrator":
            return self.role
        return f"{self.group_name}.{self.rank}" if self.role == "prefill" else self.group_name
