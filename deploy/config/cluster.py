"""Configuration of a served cluster: one model per section, each field with its meaning and unit.

Users write a TOML file and `--set section.field=value` (deploy.config.file). The configuration is validated once, when
it is read, and then never changes. `baton config` prints the first line of each section's docstring and the notes below
its fields, beside the values in force: so each is one line. A default that `baton local` or the orchestrator has as
well is taken from there.
"""

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    field_validator,
    model_validator,
)

from baton.errors import ConfigError
from baton.process.paths import cache_folder
from deploy.config.byte_sizes import parse_bytes
from deploy.config.worker import DEFAULT_MODEL, LocalConfig, WorkerConfig, read_variable, use_threads
from orchestrator.requests.config import Disaggregation, OrchestratorConfig
from orchestrator.requests.tenants import Tenant, Tenants, hash_key

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)]
"""A number of bytes, or text like "1.5GiB"."""
Port = Annotated[int, Field(ge=0, le=65535)]
Cores = Annotated[tuple[Annotated[StrictInt, Field(ge=0)], ...], Field(strict=False)]
"""A tuple of core numbers; not strict, because TOML has lists and no tuples."""
CoresOfEach = Annotated[tuple[Cores, ...], Field(strict=False)]
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


class Section(BaseModel):
    """Base of all sections: immutable, without unknown keys or silent conversions, fields described by their
    docstrings."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class ModelSection(Section):
    """The model that is served."""

    name: Annotated[str, Field(min_length=1)] = DEFAULT_MODEL
    """Hugging Face folder, GGUF file, or known name of the model."""
    cache: Annotated[Path, Field(strict=False)] = Field(default_factory=cache_folder)
    """Folder in which converted models are kept."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Number format of weights, activations and KV: bfloat16 or float32."""
    quantization: Literal["none", "int8"] = "none"
    """none, or int8: weights rounded to half the bytes to read, which changes answers a little."""

    @property
    def description(self) -> str:
        """The number formats of weights and KV, in words for people."""
        return self.dtype if self.quantization == "none" else f"{self.dtype}, weights {self.quantization}"


class PrefillSection(Section):
    """The prefill groups: chains of worker processes (ranks) that share each prompt."""

    num_groups: Annotated[int, Field(ge=0, le=64)] = 1
    """Prefill groups, each a chain of ranks; 0: none, generation groups prefill by themselves (colocated)."""
    num_ranks: Annotated[int, Field(ge=1, le=64)] = LocalConfig.num_ranks
    """Ranks of each prefill group."""
    num_threads: Count = LocalConfig.prefill_threads
    """Threads with which each rank computes."""
    cores: CoresOfEach = ()
    """Cores that each rank is pinned to, one list for each rank of all groups in order; empty: not pinned."""
    watchdog_floor_s: Seconds = LocalConfig.watchdog_floor_s
    """Shortest time without progress, in seconds, after which a rank counts as stalled and its chain is linked anew."""
    calibration: str = ""
    """File of costs to predict by, which `baton calibrate` replaces; empty: the one kept for model and hardware."""
    prefix_share: Annotated[float, Field(ge=0, le=1)] = LocalConfig.prefix_share
    """Fraction of each node's /dev/shm for KV of earlier prompts, reused by prompts that begin alike; 0: none."""
    prefix_disk_bytes: Bytes = WorkerConfig.prefix_disk_bytes
    """Bytes of each node's disk, in model.cache, for KV that /dev/shm has no room for, like "20GiB"; 0: none."""
    block_tokens: Count = OrchestratorConfig.block_tokens
    """Tokens of a block, the unit in which prompts share KV; smaller blocks share more, and cost more."""
    prefix_isolation: bool = OrchestratorConfig.prefix_isolation
    """Whether tenants share no KV; if shared, a fast answer reveals that another tenant has sent the same prompt."""

    @field_validator("calibration")
    @classmethod
    def _absolute_calibration(cls, calibration: str) -> str:
        return _absolute(calibration)

    @model_validator(mode="after")
    def _one_list_for_each_rank(self) -> Self:
        _check_cores(self.cores, self.num_groups * self.num_ranks, "ranks")
        return self


class GenerateSection(Section):
    """The generation groups: engines that generate tokens for a batch of requests."""

    num_groups: Annotated[int, Field(ge=1, le=64)] = 1
    """Generation groups, each an engine with a batch of its own."""
    num_threads: Annotated[int, Field(ge=0)] = LocalConfig.generate_threads
    """Threads with which each engine computes; 0: one for each core."""
    cores: CoresOfEach = ()
    """Cores that each engine is pinned to, one list for each engine; empty: not pinned."""
    num_slots: Count = LocalConfig.num_slots
    """Slots of each engine: rows in its batch, one for each choice of a request."""
    max_slot_tokens: Count = LocalConfig.max_slot_tokens
    """Tokens that one slot may hold, prompt and output together."""
    max_prefill_tokens_per_step: Count = LocalConfig.max_prefill_tokens_per_step
    """Most prompt tokens that an engine prefills by itself between two decode steps."""
    max_step_stretch: Annotated[float, Field(ge=1, allow_inf_nan=False)] = LocalConfig.max_step_stretch
    """Longest decode step that also prefills, as a multiple of the step's time without prefill."""
    residency: Literal["device", "host", "infinigen", "infinigen_int4", "window", "oracle", "h2o", "int4"] = "device"
    """Where KV lives: device or host, both memory of the CPU. All others approximate: fewer keys, 4 bits, or both."""
    selection_file: str = ""
    """File that `baton prepare` wrote, for policies that choose keys; empty: where it wrote for this model."""
    pool_tokens: Annotated[int, Field(ge=0)] = LocalConfig.pool_tokens
    """Most tokens whose KV a row keeps in each layer but the first two, with residency infinigen; 0: all."""
    pool_eviction: Literal["counter", "lru", "fifo"] = "counter"
    """Token evicted when pool_tokens is reached: chosen least often (counter), longest ago (lru), or oldest (fifo)."""
    kv_memory_bytes: Bytes = LocalConfig.kv_memory_bytes
    """KV memory of each engine, like "4GiB"; 0: enough for all slots, at most half the free memory / num_groups."""
    device_memory_bytes: Bytes = LocalConfig.device_memory_bytes
    """Limit of weights and KV, like "1GiB", as on a device with that memory; only counted. 0: only kv_memory_bytes."""
    growth_tokens: Count = LocalConfig.growth_tokens
    """Output tokens for which a row gets memory when it starts; fewer fit more rows, and preempt more often."""

    @field_validator("selection_file")
    @classmethod
    def _absolute_selection(cls, selection_file: str) -> str:
        return _absolute(selection_file)

    @model_validator(mode="after")
    def _one_list_for_each_engine(self) -> Self:
        _check_cores(self.cores, self.num_groups, "engines")
        return self

    @model_validator(mode="after")
    def _a_pool_evicts(self) -> Self:
        if self.pool_tokens and self.residency != "infinigen":
            raise ValueError(
                f"pool_tokens = {self.pool_tokens} means nothing to residency {self.residency}: use 0, or infinigen"
            )
        return self


class TenantSection(Section):
    """A tenant, which shares the queue with other tenants."""

    weight: Annotated[float, Field(ge=0.1, le=1000)] = Tenant.weight
    """Prompt tokens that the tenant is served while others wait, for each one of a tenant of weight 1."""
    max_queued_requests: Annotated[int, Field(ge=0)] = Tenant.max_queued
    """Requests that the tenant may have waiting; 0: as many as the queue holds."""
    max_queued_tokens: Annotated[int, Field(ge=0)] = Tenant.max_queued_tokens
    """Prompt tokens that the tenant may have waiting; 0: as many as the queue holds."""
    max_running: Annotated[int, Field(ge=0)] = Tenant.max_running
    """Choices of the tenant's requests that may run at once; 0: as many as there are slots."""
    api_keys: Annotated[tuple[ApiKey, ...], Field(strict=False)] = ()
    """API keys of the tenant, env:NAME or sha256:HEX; if there are any, only calls with one are the tenant's."""

    def tenant(self, name: str) -> Tenant:
        """Return the tenant of that name, as the orchestrator takes it."""
        return Tenant(
            name,
            weight=self.weight,
            max_queued=self.max_queued_requests,
            max_queued_tokens=self.max_queued_tokens,
            max_running=self.max_running,
            key_hashes=tuple(key.removeprefix("sha256:") for key in self.api_keys),
        )


class OrchestratorSection(Section):
    """The orchestrator, which serves clients and places their requests."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address of the interface that the orchestrator listens on."""
    port: Port = 50051
    """Port for clients; 0 takes any free one."""
    metrics_port: Annotated[int, Field(ge=-1, le=65535)] = 0
    """Port of /metrics, for Prometheus; 0 takes any free one, which `baton status` shows; -1: no metrics."""
    cores: Cores = ()
    """Cores that the orchestrator is pinned to; empty: not pinned."""
    max_queued_requests: Count = OrchestratorConfig.max_queued
    """Requests that may wait; beyond, the one with the weakest claim is refused, with a time after which to retry."""
    max_queued_tokens: Count = OrchestratorConfig.max_queued_tokens
    """Prompt tokens that may wait, over all requests."""
    max_attempts: Count = OrchestratorConfig.max_attempts
    """Attempts at one request before its error is reported."""
    lease_ttl_s: Seconds = OrchestratorConfig.lease_ttl_s
    """Seconds after the last push or renewal until a reserved slot is freed."""
    elastic: bool = OrchestratorConfig.elastic
    """Whether a prompt gets the ranks and turn that cost all prompts least; else all ranks, in order of arrival."""
    overtaking: Annotated[float, Field(ge=0, allow_inf_nan=False)] = OrchestratorConfig.overtaking
    """Delay that shorter, later prompts may cause a prompt by overtaking it, as a fraction of its predicted time."""
    disaggregation: Disaggregation = OrchestratorConfig.disaggregation
    """What prefills: a chain (always), the generation group (never), or the one predicted to be sooner (auto)."""
    trust_tenant_metadata: bool = False
    """Whether a call without a key may name its tenant (baton-tenant); for gateways that know their callers."""
    require_api_key: bool = False
    """Whether a call that does not identify its tenant is refused; if not, it belongs to the tenant "default"."""
    operator_keys: Annotated[tuple[ApiKey, ...], Field(strict=False)] = ()
    """Keys for drain, reload and calibrate, env:NAME or sha256:HEX; none: any caller on this machine may."""
    model_folders: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Folders below which `baton reload --model` finds models; empty: model.cache, and that of the served model."""
    tenants: dict[Name, TenantSection] = {}
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
            [section.tenant(name) for name, section in self.tenants.items()],
            trust_metadata=self.trust_tenant_metadata,
            require_key=self.require_api_key,
            operator_hashes=tuple(key.removeprefix("sha256:") for key in self.operator_keys),
        )

    def folders_of_models(self, served: Path, cache: Path) -> tuple[Path, ...]:
        """Return the folders below which operators may name a model; by default, the cache and the folder that holds
        `served`."""
        beside = served.absolute().parent
        is_root = beside == beside.parent  # the root folder would allow every file of the machine
        default = (served.absolute() if is_root else beside, cache.absolute())
        return tuple(Path(each) for each in self.model_folders) or tuple(dict.fromkeys(default))

    @field_validator("model_folders")
    @classmethod
    def _absolute_folders(cls, model_folders: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_absolute(each) for each in model_folders)


class SupervisionSection(Section):
    """How workers are watched, and when they are replaced."""

    start_timeout_s: Seconds = LocalConfig.start_timeout_s
    """Seconds in which a worker must load its model and answer."""
    heartbeat_s: Seconds = LocalConfig.heartbeat_s
    """Seconds between two heartbeats."""
    dead_after_s: Seconds = LocalConfig.dead_after_s
    """Seconds without an answered heartbeat after which a worker is killed and replaced."""

    @model_validator(mode="after")
    def _more_than_one_heartbeat(self) -> Self:
        if self.dead_after_s <= self.heartbeat_s:
            raise ValueError(f"dead_after_s = {self.dead_after_s:g} is out of range: use more than heartbeat_s")
        return self


class RaySection(Section):
    """The Ray cluster that the workers run on."""

    address: str = ""
    """host:port of a running Ray that declares baton_prefill and baton_generate, one a worker; empty: start one."""
    object_store_mib: Annotated[int, Field(ge=75)] = 80
    """Object store of a Ray that is started here, in MiB. Baton puts nothing large into it."""


class ClusterConfig(Section):
    """Everything that `baton serve` brings up."""

    name: Name = "baton"
    """Name of the cluster, for `baton status` and `baton stop`; also the namespace of its Ray actors."""
    worker_host: Annotated[str, Field(min_length=1)] = LocalConfig.host
    """Address of the interface that workers, their links and a Ray started here bind to."""
    model: ModelSection = Field(default_factory=ModelSection)
    prefill: PrefillSection = Field(default_factory=PrefillSection)
    generate: GenerateSection = Field(default_factory=GenerateSection)
    orchestrator: OrchestratorSection = Field(default_factory=OrchestratorSection)
    supervision: SupervisionSection = Field(default_factory=SupervisionSection)
    ray: RaySection = Field(default_factory=RaySection)

    @property
    def num_workers(self) -> int:
        """Workers in all: ranks and engines, without the orchestrator."""
        return self.prefill.num_groups * self.prefill.num_ranks + self.generate.num_groups

    def worker(self, folder: Path, role: str, group: int, rank: int) -> WorkerConfig:
        """Return the configuration of one worker; `folder` holds the resolved model."""
        prefill, generate = self.prefill, self.generate
        place = group * prefill.num_ranks + rank if role == "prefill" else group
        all_cores = prefill.cores if role == "prefill" else generate.cores
        return WorkerConfig(
            role=role,
            group=group,
            rank=rank,
            model_folder=str(folder),
            dtype=self.model.dtype,
            quantization=self.model.quantization,
            num_threads=prefill.num_threads if role == "prefill" else use_threads(generate.num_threads),
            cores=all_cores[place] if all_cores else (),
            host=self.worker_host,
            num_slots=generate.num_slots,
            max_slot_tokens=generate.max_slot_tokens,
            max_prefill_tokens_per_step=generate.max_prefill_tokens_per_step,
            residency=generate.residency,
            selection_file=generate.selection_file,
            pool_tokens=generate.pool_tokens,
            pool_eviction=generate.pool_eviction,
            kv_memory_bytes=generate.kv_memory_bytes,
            device_memory_bytes=generate.device_memory_bytes,
            max_step_stretch=generate.max_step_stretch,
            growth_tokens=generate.growth_tokens,
            num_engines=generate.num_groups,
            watchdog_floor_s=prefill.watchdog_floor_s,
            cluster=self.name,
            prefix_share=prefill.prefix_share,
            prefix_disk=str(self.model.cache),
            prefix_disk_bytes=prefill.prefix_disk_bytes,
        )


def _absolute(path: str) -> str:
    """Return the path as an absolute one, because the cluster's processes run in folders of their own."""
    return str(Path(path).expanduser().absolute()) if path else ""


def _check_cores(cores: tuple[tuple[int, ...], ...], num_workers: int, what: str) -> None:
    if cores and len(cores) != num_workers:
        raise ValueError(f"cores has {len(cores)} lists: give one for each of the {num_workers} {what}, or none")
    if not all(cores):
        raise ValueError("cores has an empty list: give each worker at least one core, or leave cores empty")
