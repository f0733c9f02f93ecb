"""Sections of a cluster's configuration: one class per section. The docstring of each field states its meaning and
unit.

The settings of a role are declared in the package of the role (`generate_workers.config`, `prefill_workers.config`,
`orchestrator.requests.config`). The section of a role adds the number of its groups and the nodes and cores that they
run on. `deploy.config.cluster` combines the sections.

`baton config` prints the first line of each section's docstring and each field's docstring. Therefore each of these
docstrings is one line.
"""

import re
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from baton.errors import ConfigError
from baton.settings.base import AbsolutePath, Bytes, Count, Seconds, settings, values_of
from baton.settings.paths import cache_folder
from baton.settings.place import LOOPBACK, Cores, EmulatedLink, ModelFormats, PrefixRoom
from baton.types import DeviceName
from deploy.config.environment import DEFAULT_MODEL, read_variable
from gateway.door.rules import HttpRules
from generate_workers.config import EngineConfig
from orchestrator.requests.config import OrchestratorLimits, PrefixRules
from orchestrator.requests.tenants import Tenant, TenantLimits, TenantName, Tenants, hash_key
from prefill_workers.config import PrefillConfig

Port = Annotated[int, Field(ge=0, le=65535)]
GpuShare = Annotated[float, Field(gt=0, le=1)]
CoresOfEach = tuple[Cores, ...]
"""Cores that workers are pinned to: one tuple of core numbers for each worker."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,40}$")]
"""Name of 1 to 40 letters, digits, - and _. Other characters are not allowed, because names become parts of file names
and of actor names."""


def _hashed(key: str) -> str:
    """Return the hash of an API key. Reads env:NAME from the environment of this process, so that other processes get
    only the hash."""
    source, _, value = key.partition(":")
    if source == "env":
        try:
            return f"sha256:{hash_key(read_variable(value))}"
        except ConfigError as error:
            raise ValueError(str(error)) from error
    if source == "sha256" and re.fullmatch("[0-9a-f]{64}", value):
        return key
    raise ValueError(
        "is not a key reference: write env:NAME, or sha256: and 64 hexadecimal digits; never the key itself"
    )


ApiKey = Annotated[str, AfterValidator(_hashed)]
"""Reference to an API key: env:NAME is the environment variable that contains the key, and sha256:HEX is the key's
hash. Validation converts the first form to the second."""


Arrangement = Literal["auto", "configured"]

NodeLabels = tuple[Annotated[str, Field(pattern=r"^[^=\s]+=[^=\s]+$")], ...]
"""Labels that a node of Ray must have, each written as key=value."""


@settings
class ModelSection(ModelFormats):
    """The model that is served."""

    name: Annotated[str, Field(min_length=1)] = DEFAULT_MODEL
    """Model to serve: Hugging Face folder, GGUF file, known name, or ORGANISATION/NAME on a hub (docs/models.md)."""
    cache: Path = field(default_factory=cache_folder)
    """Folder for converted models."""
    search: tuple[AbsolutePath, ...] = ()
    """Folders (e.g. a mounted share) in which nodes without the model's folder look for one with the same name."""

    @property
    def description(self) -> str:
        """Number formats of weights and KV, as readable text."""
        return self.dtype if self.weights == "stored" else f"{self.dtype}, weights {self.weights}"


@settings
class PrefillSection(PrefillConfig, PrefixRoom, PrefixRules):
    """The prefill groups: chains of worker processes (ranks), which compute each prompt together."""

    num_groups: Annotated[int, Field(ge=0, le=64)] = 1
    """Number of prefill groups (chains of ranks); 0: the generation groups prefill by themselves (colocated)."""
    num_ranks: Annotated[int, Field(ge=1, le=64)] = 2
    """Number of ranks in each prefill group."""
    across_nodes: bool = False
    """Allow a group that does not fit on one node to span several; such a group does not use the prefix cache."""
    device: DeviceName = "auto"
    """Device of each rank: cpu, cuda, emulated (docs/devices.md), or auto (GPUs if there are any)."""
    gpu_share: GpuShare = 1.0
    """Fraction of a GPU that Ray gives each rank on cuda; below 1, ranks share GPUs: set device_memory_bytes too."""
    num_threads: Count = 1
    """Number of compute threads of each rank."""
    cores: CoresOfEach = ()
    """Cores that each rank is pinned to, one list per rank: by group, then by rank; empty: not pinned."""
    node_labels: NodeLabels = ()
    """Labels that a Ray node must have to run prefill groups, each key=value; empty: any node."""

    @model_validator(mode="after")
    def _one_list_for_each_rank(self) -> Self:
        _check_cores(self.cores, self.num_groups * self.num_ranks, "ranks")
        return self


@settings
class GenerateSection(EngineConfig):
    """The generation groups: engines that generate tokens for a batch of requests."""

    num_groups: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of generation groups. Each group is one engine with its own batch."""
    device: DeviceName = "auto"
    """Device of each engine: cpu, cuda, emulated (docs/devices.md), or auto (GPUs if there are any)."""
    gpu_share: GpuShare = 1.0
    """Fraction of a GPU that Ray gives each engine on cuda; below 1, engines share it: set device_memory_bytes too."""
    num_threads: Annotated[int, Field(ge=0)] = 0
    """Number of compute threads of each engine; 0: one thread per core."""
    cores: CoresOfEach = ()
    """Cores that each engine is pinned to, one list per engine; empty: not pinned."""
    node_labels: NodeLabels = ()
    """Labels that a Ray node must have to run generation groups, each key=value; empty: any node."""

    @model_validator(mode="after")
    def _one_list_for_each_engine(self) -> Self:
        _check_cores(self.cores, self.num_groups, "engines")
        return self


@settings
class DeviceSection(EmulatedLink):
    """The emulated device (the CPU with separate memory behind a link), used by groups with device = emulated."""


@settings
class TenantSection(TenantLimits):
    """A tenant, which shares the request queue with other tenants."""

    api_keys: tuple[ApiKey, ...] = ()
    """API keys of the tenant: env:NAME or sha256:HEX; if any are set, the tenant's calls must contain one of them."""


@settings
class OrchestratorSection(OrchestratorLimits):
    """The orchestrator, which accepts requests from clients and schedules them on groups."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address of the interface that the orchestrator listens on."""
    port: Port = 50051
    """Port for gRPC clients; 0: any free port."""
    metrics_port: Annotated[int, Field(ge=-1, le=65535)] = 0
    """Port of the Prometheus endpoint /metrics; 0: any free port (`baton status` shows it), -1: no metrics."""
    cores: Cores = ()
    """Cores that the orchestrator is pinned to; empty: not pinned."""
    trust_tenant_metadata: bool = False
    """Trust the tenant in the metadata baton-tenant if a call has no API key; for gateways that check callers."""
    require_api_key: bool = False
    """Refuse calls that do not identify their tenant; if false, such calls belong to the tenant "default"."""
    operator_keys: tuple[ApiKey, ...] = ()
    """Keys for drain and reload: env:NAME or sha256:HEX; empty: only the cluster's secret is required."""
    model_folders: tuple[AbsolutePath, ...] = ()
    """Folders that may contain models for `baton reload --model`; empty: model.cache and the served model's parent."""
    tenants: dict[TenantName, TenantSection] = field(default_factory=dict)
    """Tenants that share the request queue, by name; each has its own section, e.g. [orchestrator.tenants.acme]."""

    @model_validator(mode="after")
    def _tenants_can_be_told_apart(self) -> Self:
        try:
            self.tenancy()
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self

    def tenancy(self) -> Tenants:
        """Return the tenants, and the rules by which the orchestrator identifies the tenant of a call."""
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
        """Return the folders that may contain the models that operators name. By default, these are `cache` and the
        parent folder of `served`. `served` is the folder of the served model. If its parent is the root folder,
        `served` is used instead of the parent."""
        beside = served.absolute().parent
        is_root = beside == beside.parent  # the root folder would allow every file of the machine
        default = (served.absolute() if is_root else beside, cache.absolute())
        return tuple(Path(each) for each in self.model_folders) or tuple(dict.fromkeys(default))


@settings
class HttpSection(HttpRules):
    """OpenAI's API over HTTP, which `baton serve` serves in a separate process (docs/http.md)."""

    host: Annotated[str, Field(min_length=1)] = LOOPBACK
    """Address of the interface that the HTTP gateway listens on."""
    port: Annotated[int, Field(ge=-1, le=65535)] = 8000
    """Port for HTTP clients; 0: any free port (`baton serve` prints it), -1: no HTTP."""
    certificate: AbsolutePath = ""
    """PEM file with the certificate chain for HTTPS; empty: plain HTTP."""
    private_key: AbsolutePath = ""
    """PEM file with the private key of the certificate."""
    grace_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 5.0
    """Seconds to finish running requests when the gateway stops; new requests are refused with status 503."""
    console: bool = True
    """True: serve the web console at /console."""
    tool_format: Literal["auto", "hermes", "llama3", "mistral", "smollm2", "none"] = "auto"
    """Format of the model's tool calls: auto (from its chat template), hermes, llama3, mistral, smollm2, or none."""
    max_responses: Annotated[int, Field(ge=0)] = 4096
    """Maximum number of /v1/responses responses stored, so that later requests can continue them; 0: store none."""
    max_responses_bytes: Bytes = 64 * 2**20
    """Maximum memory for stored responses and their conversations, in bytes or as text like "64MiB"."""
    keep_responses_s: Seconds = 24 * 3600.0
    """Seconds after which a stored response is deleted."""

    @model_validator(mode="after")
    def _certificate_and_key(self) -> Self:
        if bool(self.certificate) != bool(self.private_key):
            raise ValueError("certificate and private_key belong together: set both, or neither")
        return self


@settings
class SupervisionSection:
    """Supervision of workers: heartbeats, and timeouts after which workers are replaced."""

    start_timeout_s: Seconds = 120.0
    """Timeout in seconds for a worker to load its model and to answer the first call."""
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
    """The Ray cluster on which the workers run."""

    address: str = ""
    """Address of a running Ray with resources baton_prefill and baton_generate (1 per worker); empty: start a Ray."""
    object_store_mib: Annotated[int, Field(ge=75)] = 80
    """Size in MiB of the object store of a Ray that Baton starts. Baton stores no large objects in it."""
    node_wait_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Seconds that a group waits for a node that can hold it (Ray's autoscaler); 0: fail at once if no node can."""
    head_wait_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 60.0
    """Seconds without an answer from Ray (e.g. while Ray's head restarts) after which a serving launcher ends."""


def _hashes(api_keys: tuple[ApiKey, ...]) -> tuple[str, ...]:
    return tuple(key.removeprefix("sha256:") for key in api_keys)


def _check_cores(cores: tuple[tuple[int, ...], ...], num_workers: int, what: str) -> None:
    if cores and len(cores) != num_workers:
        raise ValueError(f"cores has {len(cores)} lists: give one for each of the {num_workers} {what}, or none")
    if not all(cores):
        raise ValueError("cores has an empty list: give each worker at least one core, or leave cores empty")
