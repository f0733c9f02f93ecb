"""Configuration of a cluster: its sections (`deploy.config.sections`), and the worker configurations that are derived
from it.

Users write a TOML file and `--set section.field=value` (`deploy.config.file`). The configuration is validated once,
when it is read. It is immutable.
"""

import math
from dataclasses import field, replace
from pathlib import Path
from typing import Self

from pydantic import model_validator

from baton.settings.base import part_of, settings, values_of
from baton.settings.place import EmulatedLink, LogLines, ModelFormats, PrefixRoom, WorkerPlace
from baton.transport.identity import ClusterSecret
from deploy.config.sections import (
    Arrangement,
    DeviceSection,
    GenerateSection,
    HttpSection,
    ModelSection,
    Name,
    OrchestratorSection,
    PrefillSection,
    RaySection,
    SupervisionSection,
)
from deploy.config.worker import Role, WorkerConfig
from generate_workers.config import EngineConfig
from orchestrator.requests.config import AutoscalingConfig, OrchestratorConfig, OrchestratorLimits, PrefixRules
from prefill_workers.config import PrefillConfig


@settings
class ClusterConfig(LogLines):
    """Configuration of everything that `baton serve` starts."""

    name: Name = "baton"
    """Name of the cluster, for `baton status` and `baton stop`; also the namespace of its Ray actors."""
    arrangement: Arrangement = "auto"
    """Source of ranks, threads and cores if the user sets none: auto (fit to this machine), configured (defaults)."""
    worker_host: str = ""
    """Address that workers and their links bind to; empty: the node's address on a running Ray, else 127.0.0.1."""
    model: ModelSection = field(default_factory=ModelSection)
    prefill: PrefillSection = field(default_factory=PrefillSection)
    generate: GenerateSection = field(default_factory=GenerateSection)
    device: DeviceSection = field(default_factory=DeviceSection)
    orchestrator: OrchestratorSection = field(default_factory=OrchestratorSection)
    http: HttpSection = field(default_factory=HttpSection)
    autoscaling: AutoscalingConfig = field(default_factory=AutoscalingConfig)
    supervision: SupervisionSection = field(default_factory=SupervisionSection)
    ray: RaySection = field(default_factory=RaySection)

    @model_validator(mode="after")
    def _groups_can_be_scaled(self) -> Self:
        num_groups = self.prefill.num_groups + self.generate.num_groups
        if self.autoscaling.mode != "off" and not self.prefill.num_groups:
            raise ValueError("autoscaling needs a prefill group to begin with: set prefill.num_groups to 1 or more")
        if self.autoscaling.mode != "off" and num_groups > self.autoscaling.max:
            raise ValueError(f"autoscaling.max = {self.autoscaling.max} is below the {num_groups} groups configured")
        return self

    @property
    def most_groups(self) -> dict[str, int]:
        """Largest possible number of groups of each role. It is the configured number of groups. If autoscaling is in
        mode `act`, it is at least `autoscaling.max` - 1, because the other role keeps at least one group."""
        groups = {"prefill": self.prefill.num_groups, "generate": self.generate.num_groups}
        if self.autoscaling.mode != "act":
            return groups
        return {role: max(number, self.autoscaling.max - 1) for role, number in groups.items()}

    @property
    def num_workers(self) -> int:
        """Total number of workers (ranks and engines), without the orchestrator."""
        return sum(self.group_sizes.values())

    @property
    def group_sizes(self) -> dict[str, int]:
        """Number of workers of each configured group, by the group's name (for example prefill-0)."""
        sizes = {f"prefill-{number}": self.prefill.num_ranks for number in range(self.prefill.num_groups)}
        return sizes | {f"generate-{number}": 1 for number in range(self.generate.num_groups)}

    @property
    def node_labels(self) -> dict[str, dict[str, str]]:
        """Labels that a node must have to run workers of a role, by role. Roles that may run on any node are not
        included."""
        asked = {"prefill": self.prefill.node_labels, "generate": self.generate.node_labels}
        return {role: dict(each.split("=", 1) for each in labels) for role, labels in asked.items() if labels}

    @property
    def gpu_shares(self) -> dict[str, float]:
        """Fraction of a GPU that each worker receives, by role. Roles that do not run on cuda are not included."""
        prefill, generate = self.prefill, self.generate
        pools = ("prefill", prefill.device, prefill.gpu_share), ("generate", generate.device, generate.gpu_share)
        return {role: share for role, device, share in pools if device == "cuda"}

    @property
    def num_gpus(self) -> int:
        """Number of GPUs that all configured workers on cuda need together."""
        shares, groups = self.gpu_shares, self.group_sizes.items()
        total = sum(size * shares.get(name.partition("-")[0], 0.0) for name, size in groups)
        return math.ceil(round(total, 6))  # rounded: three thirds are one GPU

    def workers(self, name: str, place: WorkerPlace) -> tuple[WorkerConfig, ...]:
        """Return the configurations of the workers of the group `name`, in rank order.

        `place` contains the values that the launcher adds to the configuration: `model_folder`, `kernels` and `secret`.
        Its `model` and `cluster`, if not empty, override the configured names. Its `host` is used only if `worker_host`
        is not configured.

        A group whose number is higher than the configured number of groups uses the cores of one of the configured
        groups. On one machine, the memory for KV is divided among the largest possible number of engines
        (`most_groups`).
        """
        number = int(name.partition("-")[2])
        is_chain = name.startswith("prefill-")
        role: Role = "prefill" if is_chain else "generate"
        section = self.prefill if is_chain else self.generate
        size = self.prefill.num_ranks if is_chain else 1
        place = replace(
            place,
            **values_of(ModelFormats, self.model),
            **values_of(PrefixRoom, self.prefill),
            **values_of(EmulatedLink, self.device),
            **values_of(LogLines, self),
            device=section.device,
            gpu_share=section.gpu_share,
            model=place.model or self.model.name,
            model_search=tuple(Path(each) for each in self.model.search),
            host=self.worker_host or place.host,
            num_threads=section.num_threads,
            cluster=place.cluster or self.name,
            prefix_disk=str(self.model.cache),
            num_engines=self.generate.num_groups if self.ray.address else self.most_groups["generate"],
        )
        settings = part_of(PrefillConfig, self.prefill) if is_chain else part_of(EngineConfig, self.generate)
        first = number % max(1, section.num_groups) * size
        cores = section.cores[first : first + size] or ((),) * size
        return tuple(
            WorkerConfig(role, number, rank, replace(place, cores=cores[rank]), settings) for rank in range(size)
        )

    def orchestrator_config(self, folder: Path) -> OrchestratorConfig:
        """Return the settings of the orchestrator. `folder` is the folder of the resolved model."""
        return OrchestratorConfig(
            **values_of(OrchestratorLimits, self.orchestrator),
            **values_of(PrefixRules, self.prefill),
            tenants=self.orchestrator.tenancy(),
            model_folders=self.orchestrator.folders_of_models(folder, self.model.cache),
            autoscaling=self.autoscaling,
        )

    def orchestrator_worker(self, folder: Path, secret: ClusterSecret) -> WorkerConfig:
        """Return the configuration of the orchestrator's process. The supervisor connects to this process on the same
        machine. `folder` is the folder of the resolved model on the launcher's machine. On other machines the process
        finds the model by its name."""
        place = WorkerPlace(
            model_folder=folder,
            model=self.model.name,
            model_search=tuple(Path(each) for each in self.model.search),
            cores=self.orchestrator.cores,
            **values_of(LogLines, self),
            secret=secret.text,
        )
        return WorkerConfig("orchestrator", 0, 0, place, self.orchestrator_config(folder))
