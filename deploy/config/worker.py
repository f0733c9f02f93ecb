"""Settings of one worker, as its launcher passes them to its process."""

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
    """One worker: its role and number, where it runs, and the settings of its role. A line of JSON to its process."""

    role: Role
    group: int
    """Number of the worker's group among those of its role."""
    rank: int
    """Rank in the prefill group; 0 for other roles."""
    place: WorkerPlace
    section: Section
    """Settings of the role."""

    @property
    def group_name(self) -> str:
        """Name of the worker's group: ROLE-GROUP."""
        return f"{self.role}-{self.group}"

    @property
    def name(self) -> str:
        """Name of the worker: that of its group, in a chain with .RANK, or orchestrator."""
        if self.role == "orchestrator":
            return self.role
        return f"{self.group_name}.{self.rank}" if self.role == "prefill" else self.group_name
