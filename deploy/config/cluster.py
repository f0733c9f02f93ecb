"""Configuration of a cluster: one class a section, each field with its meaning and unit.

Users write a TOML file and `--set section.field=value` (deploy.config.file). The configuration is validated once, when
it is read, and then never changes. `baton config` prints the first line of each section's docstring and the notes below
its fields, beside the values in force: so each is one line. What a role goes by is declared with the role
(`generate_workers.config`, `prefill_workers.config`, `orchestrator.requests.config`); its section here adds how many
there are and where they run.
"""

import re
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from baton.errors import ConfigError
from baton.settings.base import AbsolutePath, Count, Seconds, part_of, settings, values_of
from baton.settings.paths import cache_folder
from baton.settings.place import LOOPBACK, Cores, EmulatedLink, ModelFormats, PrefixRoom, WorkerPlace
from baton.types import DeviceName, KernelChoice
from deploy.config.environment import DEFAULT_MODEL, read_variable
from deploy.config.worker import Role, WorkerConfig
from generate_workers.config import EngineConfig
from orchestrator.requests.config import AutoscalingConfig, OrchestratorConfig, OrchestratorLimits, PrefixRules
from orchestrator.requests.tenants import Tenant, TenantLimits, TenantName, Tenants, hash_key
from prefill_workers.config import PrefillConfig
from transport.identity import ClusterSecret

Port = Annotated[int, Field(ge=0, le=65535)]
CoresOfEach = tuple[Cores, ...]
"""A tuple with one tuple of core numbers for each worker."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,40}$")]
"""A name of letters, digits, - and _, because it becomes part of file and actor names."""


def _hashed(key: str) -> str:
    """Return an API key as its hash. Reads env:NAME from the environment of this process, so that other processes see
    only the hash."""
    source, _, value = key.partition(":")
    if source == "env":
        try:
            return f"sha256:{hash_key(read_variable(value))}"
        except ConfigError as error:
            raise ValueError(str(error)) from error
    if source == "sha256" and re.fullmatch("[0-9a-f]{64}", value):
        return key
    raise ValueError("is no key: write env:NAME, or sha256: and 64 hexadecimal digits; never the key itself")


ApiKey = Annotated[str, AfterValidator(_hashed)]
"""An API key: env:NAME, an environment variable that holds it, or sha256:HEX, its hash. Validation turns the first form
into the second."""


NodeLabels = tuple[Annotated[str, Field(pattern=r"^[^=\s]+=[^=\s]+$")], ...]
"""Labels of Ray's nodes, each written as key=value."""


@settings
class ModelSection(ModelFormats):
    """The model that is served."""

    name: Annotated[str, Field(min_length=1)] = DEFAULT_MODEL
    """Hugging Face folder, GGUF file, or known name of the model."""
    cache: Path = field(default_factory=cache_folder)
    """Folder in which converted models are kept."""
    search: tuple[AbsolutePath, ...] = ()
    """Folders in which nodes that lack the model's folder look for one of that name, like a mounted share."""

    @property
    def description(self) -> str:
        """The number formats of weights and KV, in words for people."""
        return self.dtype if self.quantization == "none" else f"{self.dtype}, weights {self.quantization}"


@settings
class PrefillSection(PrefillConfig, PrefixRoom, PrefixRules):
    """The prefill groups: chains of worker processes (ranks) that share each prompt."""

    num_groups: Annotated[int, Field(ge=0, le=64)] = 1
    """Prefill groups, each a chain of ranks; 0: none, generation groups prefill by themselves (colocated)."""
    num_ranks: Annotated[int, Field(ge=1, le=64)] = 2
    """Ranks of each prefill group."""
    across_nodes: bool = False
    """Whether a group that no node has room for may lie on several; it then begins no prompt from cached KV."""
    device: DeviceName = "auto"
    """Where each rank computes: cpu, cuda, emulated (docs/devices.md), or auto: the CPU."""
    num_threads: Count = 1
    """Threads with which each rank computes."""
    cores: CoresOfEach = ()
    """Cores that each rank is pinned to, one list for each rank of all groups in order; empty: not pinned."""
    node_labels: NodeLabels = ()
    """Labels that a node of Ray must have to hold prefill groups, each key=value; empty: any node."""
    calibration: AbsolutePath = ""
    """File of costs to predict by, which `baton calibrate` replaces; empty: the one kept for model and hardware."""

    @model_validator(mode="after")
    def _one_list_for_each_rank(self) -> Self:
        _check_cores(self.cores, self.num_groups * self.num_ranks, "ranks")
        return self


@settings
class GenerateSection(EngineConfig):
    """The generation groups: engines that generate tokens for a batch of requests."""

    num_groups: Annotated[int, Field(ge=1, le=64)] = 1
    """Generation groups, each an engine with a batch of its own."""
    device: DeviceName = "auto"
    """Where each engine computes: cpu, cuda, emulated (docs/devices.md), or auto: the CPU."""
    num_threads: Annotated[int, Field(ge=0)] = 0
    """Threads with which each engine computes; 0: one for each core."""
    cores: CoresOfEach = ()
    """Cores that each engine is pinned to, one list for each engine; empty: not pinned."""
    node_labels: NodeLabels = ()
    """Labels that a node of Ray must have to hold generation groups, each key=value; empty: any node."""

    @model_validator(mode="after")
    def _one_list_for_each_engine(self) -> Self:
        _check_cores(self.cores, self.num_groups, "engines")
        return self


@settings
class DeviceSection(EmulatedLink):
    """Emulated devices, for groups whose device is emulated: the CPU, with memory of its own behind a link."""


@settings
class TenantSection(TenantLimits):
    """A tenant, which shares the queue with other tenants."""

    api_keys: tuple[ApiKey, ...] = ()
    """API keys of the tenant, env:NAME or sha256:HEX; if there are any, only calls with one are the tenant's."""


@settings
class OrchestratorSection(OrchestratorLimits):
    """The orchestrator, which serves clients and places their requests."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address of the interface that the orchestrator listens on."""
    port: Port = 50051
    """Port for clients; 0 takes any free one."""
    metrics_port: Annotated[int, Field(ge=-1, le=65535)] = 0
    """Port of /metrics, for Prometheus; 0 takes any free one, which `baton status` shows; -1: no metrics."""
    cores: Cores = ()
    """Cores that the orchestrator is pinned to; empty: not pinned."""
    trust_tenant_metadata: bool = False
    """Whether a call without a key may name its tenant (baton-tenant); for gateways that know their callers."""
    require_api_key: bool = False
    """Whether a call that does not identify its tenant is refused; if not, it belongs to the tenant "default"."""
    operator_keys: tuple[ApiKey, ...] = ()
    """Keys for drain, reload and calibrate, env:NAME or sha256:HEX; none: the cluster's secret alone does."""
    model_folders: tuple[AbsolutePath, ...] = ()
    """Folders below which `baton reload --model` finds models; empty: model.cache, and that of the served model."""
    tenants: dict[TenantName, TenantSection] = field(default_factory=dict)
    """Tenants that share the queue, by name: each a section of its own, like [orchestrator.tenants.acme]."""

    @model_validator(mode="after")
    def _tenants_can_be_told_apart(self) -> Self:
        try:
            self.tenancy()
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self

    def tenancy(self) -> Tenants:
        """Return the tenants and the rules that tell them apart, as the orchestrator takes them."""
        return Tenants(
            tuple(
                Tenant(name, **values_of(TenantLimits, section), key_hashes=_hashes(section.api_keys))
                for name, section in self.tenants.items()
            ),
            trust_metadata=self.trust_tenant_metadata,
            require_key=self.require_api_key,
            operator_hashes=_hashes(self.operator_keys),
        )

    def folders_of_models(self, served: Path, cache: Path) -> tuple[Path, ...]:
        """Return the folders below which operators may name a model; by default, the cache and the folder that holds
        `served`."""
        beside = served.absolute().parent
        is_root = beside == beside.parent  # the root folder would allow every file of the machine
        default = (served.absolute() if is_root else beside, cache.absolute())
        return tuple(Path(each) for each in self.model_folders) or tuple(dict.fromkeys(default))


@settings
class SupervisionSection:
    """How workers are watched, and when they are replaced."""

    start_timeout_s: Seconds = 120.0
    """Seconds in which a worker must load its model and answer."""
    heartbeat_s: Seconds = 1.0
    """Seconds between two heartbeats."""
    dead_after_s: Seconds = 5.0
    """Seconds without an answered heartbeat after which a worker is killed and replaced."""

    @model_validator(mode="after")
    def _more_than_one_heartbeat(self) -> Self:
        if self.dead_after_s <= self.heartbeat_s:
            raise ValueError(f"dead_after_s = {self.dead_after_s:g} is out of range: use more than heartbeat_s")
        return self


@settings
class RaySection:
    """The Ray cluster that the workers run on."""

    address: str = ""
    """host:port of a running Ray that declares baton_prefill and baton_generate, one a worker; empty: start one."""
    object_store_mib: Annotated[int, Field(ge=75)] = 80
    """Object store of a Ray that is started here, in MiB. Baton puts nothing large into it."""
    node_wait_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Seconds that a group may wait for a node with room for it, which Ray's autoscaler may start; 0: none."""


@settings
class ClusterConfig:
    """Everything that `baton serve` brings up."""

    name: Name = "baton"
    """Name of the cluster, for `baton status` and `baton stop`; also the namespace of its Ray actors."""
    worker_host: str = ""
    """Address that all workers and their links bind to; empty: each node's own on a running Ray, else 127.0.0.1."""
    model: ModelSection = field(default_factory=ModelSection)
    prefill: PrefillSection = field(default_factory=PrefillSection)
    generate: GenerateSection = field(default_factory=GenerateSection)
    device: DeviceSection = field(default_factory=DeviceSection)
    orchestrator: OrchestratorSection = field(default_factory=OrchestratorSection)
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
        """Number of groups of each role that there may be: as configured, or as many as the autoscaler may start."""
        groups = {"prefill": self.prefill.num_groups, "generate": self.generate.num_groups}
        if self.autoscaling.mode != "act":
            return groups
        return {role: max(number, self.autoscaling.max - 1) for role, number in groups.items()}

    @property
    def num_workers(self) -> int:
        """Workers in all: ranks and engines, without the orchestrator."""
        return self.prefill.num_groups * self.prefill.num_ranks + self.generate.num_groups

    @property
    def group_sizes(self) -> dict[str, int]:
        """Number of workers of each configured group, by the group's name, like prefill-0."""
        sizes = {f"prefill-{number}": self.prefill.num_ranks for number in range(self.prefill.num_groups)}
        return sizes | {f"generate-{number}": 1 for number in range(self.generate.num_groups)}

    @property
    def node_labels(self) -> dict[str, dict[str, str]]:
        """Labels that nodes must have, by role; a role that takes any node is not there."""
        asked = {"prefill": self.prefill.node_labels, "generate": self.generate.node_labels}
        return {role: dict(each.split("=", 1) for each in labels) for role, labels in asked.items() if labels}

    @property
    def roles_on_gpus(self) -> frozenset[str]:
        """Roles whose workers each compute on a GPU."""
        devices = {"prefill": self.prefill.device, "generate": self.generate.device}
        return frozenset(role for role, device in devices.items() if device == "cuda")

    def workers(
        self,
        name: str,
        folder: Path,
        kernels: tuple[KernelChoice, ...] = (),
        cluster: str = "",
        *,
        secret: ClusterSecret,
        model: str = "",
        host: str = LOOPBACK,
        step_times: str = "",
    ) -> tuple[WorkerConfig, ...]:
        """Return the configurations of the workers of a group, in rank order.

        A group that is not configured, because it stands in for one that is, gets the cores of the latter. `folder`
        holds the resolved model; nodes without it find the model by the name `model` (empty: the configured one).
        `cluster` is the name by which workers share files on a node; empty: that of the cluster. `secret` is the secret
        that the cluster's processes share. `host` is the address that workers bind to without a `worker_host`; empty:
        each node's own. `step_times` is the file of what engines measured earlier, if any. Memory for KV is shared by
        all engines that there may be, where all lie on one machine.
        """
        number = int(name.partition("-")[2])
        is_chain = name.startswith("prefill-")
        role: Role = "prefill" if is_chain else "generate"
        section = self.prefill if is_chain else self.generate
        size = self.prefill.num_ranks if is_chain else 1
        place = WorkerPlace(
            **values_of(ModelFormats, self.model),
            **values_of(PrefixRoom, self.prefill),
            **values_of(EmulatedLink, self.device),
            device=section.device,
            model_folder=folder,
            model=model or self.model.name,
            model_search=tuple(Path(each) for each in self.model.search),
            host=self.worker_host or host,
            num_threads=section.num_threads,
            cluster=cluster or self.name,
            prefix_disk=str(self.model.cache),
            num_engines=self.generate.num_groups if self.ray.address else self.most_groups["generate"],
            kernels=kernels,
            secret=secret.text,
            step_times="" if is_chain else step_times,
        )
        settings = part_of(PrefillConfig, self.prefill) if is_chain else part_of(EngineConfig, self.generate)
        first = number % max(1, section.num_groups) * size
        cores = section.cores[first : first + size] or ((),) * size
        return tuple(
            WorkerConfig(role, number, rank, replace(place, cores=cores[rank]), settings) for rank in range(size)
        )

    def orchestrator_config(self, folder: Path) -> OrchestratorConfig:
        """Return the settings of the orchestrator; `folder` holds the resolved model."""
        return OrchestratorConfig(
            **values_of(OrchestratorLimits, self.orchestrator),
            **values_of(PrefixRules, self.prefill),
            tenants=self.orchestrator.tenancy(),
            model_folders=self.orchestrator.folders_of_models(folder, self.model.cache),
            autoscaling=self.autoscaling,
        )

    def orchestrator_worker(self, folder: Path, secret: ClusterSecret) -> WorkerConfig:
        """Return the configuration of the orchestrator's process, which its supervisor reaches on the same machine.
        `folder` holds the resolved model on the launcher's machine; others find the model by its name."""
        place = WorkerPlace(
            model_folder=folder,
            model=self.model.name,
            model_search=tuple(Path(each) for each in self.model.search),
            cores=self.orchestrator.cores,
            secret=secret.text,
        )
        return WorkerConfig("orchestrator", 0, 0, place, self.orchestrator_config(folder))


def _hashes(api_keys: tuple[ApiKey, ...]) -> tuple[str, ...]:
    return tuple(key.removeprefix("sha256:") for key in api_keys)


def _check_cores(cores: tuple[tuple[int, ...], ...], num_workers: int, what: str) -> None:
    if cores and len(cores) != num_workers:
        raise ValueError(f"cores has {len(cores)} lists: give one for each of the {num_workers} {what}, or none")
    if not all(cores):
        raise ValueError("cores has an empty list: give each worker at least one core, or leave cores empty")
