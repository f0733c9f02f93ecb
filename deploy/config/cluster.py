"""Configuration of a served cluster: one model per section, each field with its meaning and unit.

What a user writes is a TOML file and `--set section.field=value` (deploy.config.file); what is here is checked once,
when it enters, and then never changes. `baton config` prints these descriptions beside the values in force. Defaults
that `baton local` or the orchestrator has as well are theirs.
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
from baton.paths import cache_folder
from deploy.config.byte_sizes import parse_bytes
from deploy.config.worker import DEFAULT_MODEL, LocalConfig, WorkerConfig, read_variable, use_threads
from orchestrator.requests.config import Disaggregation, OrchestratorConfig
from orchestrator.requests.tenants import Tenant, Tenants, hash_key

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)]
"""A number, or text like "1.5GiB"."""
Port = Annotated[int, Field(ge=0, le=65535)]
Cores = Annotated[tuple[Annotated[StrictInt, Field(ge=0)], ...], Field(strict=False)]
"""Core numbers; lax, because TOML has lists and no tuples."""
CoresOfEach = Annotated[tuple[Cores, ...], Field(strict=False)]
"""One list of core numbers for each worker."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,40}$")]
"""Letters, digits, - and _: it becomes part of file and actor names."""


def _hashed(key: str) -> str:
    """Reads a key from the environment, here and now: other processes see its hash only."""
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
"""env:NAME, an environment variable that holds the key, or sha256:HEX, its hash. Always the latter once it is read."""


class Section(BaseModel):
    """Base of all sections: immutable, no unknown keys, no silent conversions, described by its docstrings."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class ModelSection(Section):
    """Which model is served."""

    name: Annotated[str, Field(min_length=1)] = DEFAULT_MODEL
    """Hugging Face folder, GGUF file, or known name."""
    cache: Annotated[Path, Field(strict=False)] = Field(default_factory=cache_folder)
    """Folder for converted models."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """bfloat16 or float32, for weights, activations and KV."""
    quantization: Literal["none", "int8"] = "none"
    """none, or int8: weights rounded to half the bytes to read, which changes answers a little."""

    @property
    def description(self) -> str:
        """The number formats, for people."""
        return self.dtype if self.quantization == "none" else f"{self.dtype}, weights {self.quantization}"


class PrefillSection(Section):
    """The prefill groups: chains of ranks."""

    num_groups: Annotated[int, Field(ge=0, le=64)] = 1
    """Chains; 0 means colocated: generation groups prefill by themselves."""
    num_ranks: Annotated[int, Field(ge=1, le=64)] = LocalConfig.num_ranks
    """Ranks of each chain."""
    num_threads: Count = LocalConfig.prefill_threads
    """torch threads of each rank."""
    cores: CoresOfEach = ()
    """Cores that each rank is pinned to, one list for each rank of all chains in order; empty: not pinned."""
    watchdog_floor_s: Seconds = LocalConfig.watchdog_floor_s
    """Seconds without progress on a rank, at least, before the links' life is ended."""
    calibration: str = ""
    """File of costs to predict by; `baton calibrate` replaces it. Empty: the one kept for this model and hardware."""
    prefix_share: Annotated[float, Field(ge=0, le=1)] = LocalConfig.prefix_share
    """Part of each node's /dev/shm for KV of earlier prompts, from which later ones that begin alike go on; 0: none."""
    prefix_disk_bytes: Bytes = WorkerConfig.prefix_disk_bytes
    """Bytes of each node's disk, in model.cache, for KV that /dev/shm has no room for, like "20GiB"; 0: none."""
    block_tokens: Count = OrchestratorConfig.block_tokens
    """Tokens of a block, the unit in which prompts that begin alike share KV: fewer share more, and cost more."""
    prefix_isolation: bool = OrchestratorConfig.prefix_isolation
    """Whether tenants share no KV; else a prompt that is answered soon tells that somebody has sent it before."""

    @field_validator("calibration")
    @classmethod
    def _absolute_calibration(cls, calibration: str) -> str:
        return _absolute(calibration)

    @model_validator(mode="after")
    def _one_list_for_each_rank(self) -> Self:
        _check_cores(self.cores, self.num_groups * self.num_ranks, "ranks")
        return self


class GenerateSection(Section):
    """The generation groups."""

    num_groups: Annotated[int, Field(ge=1, le=64)] = 1
    """Engines, each with a batch of its own."""
    num_threads: Annotated[int, Field(ge=0)] = LocalConfig.generate_threads
    """torch threads of each engine; 0: one for each core."""
    cores: CoresOfEach = ()
    """Cores that each engine is pinned to, one list for each engine; empty: not pinned."""
    num_slots: Count = LocalConfig.num_slots
    """Rows in the batch of one engine."""
    max_slot_tokens: Count = LocalConfig.max_slot_tokens
    """Tokens that one slot may hold, prompt and output."""
    max_prefill_tokens_per_step: Count = LocalConfig.max_prefill_tokens_per_step
    """Tokens of local prefill between two decode steps."""
    max_step_stretch: Annotated[float, Field(ge=1, allow_inf_nan=False)] = LocalConfig.max_step_stretch
    """How many times as long a decode step may take for the sake of local prefill."""
    residency: Literal["device", "host", "infinigen", "infinigen_int4", "window", "oracle", "h2o", "int4"] = "device"
    """Where KV lives: device or host, both memory of the CPU. Others are approximate: some keys, 4 bits, or both."""
    selection_file: str = ""
    """What `baton prepare` wrote, for approximate policies; empty: where it wrote for the model."""
    pool_tokens: Annotated[int, Field(ge=0)] = LocalConfig.pool_tokens
    """Most tokens of KV that a row keeps in each layer but the first two, by residency infinigen; 0: all."""
    pool_eviction: Literal["counter", "lru", "fifo"] = "counter"
    """Who goes then: the token that was chosen least often, the one chosen longest ago (lru), or the oldest (fifo)."""
    kv_memory_bytes: Bytes = LocalConfig.kv_memory_bytes
    """KV of one engine, like "4GiB"; 0: all that slots could hold, at most half of the free memory over num_groups."""
    device_memory_bytes: Bytes = LocalConfig.device_memory_bytes
    """Bytes for weights and KV, like "1GiB", that count as a device's: by accounts alone; 0: only kv_memory_bytes."""
    growth_tokens: Count = LocalConfig.growth_tokens
    """Tokens by which a row is expected to grow yet, when it is taken on: less packs more, and preempts more often."""

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
    """Whoever shares the queue with others."""

    weight: Annotated[float, Field(ge=0.1, le=1000)] = Tenant.weight
    """Prompt tokens that it is served while others wait, beside a tenant of weight 1."""
    max_queued_requests: Annotated[int, Field(ge=0)] = Tenant.max_queued
    """Requests that it may have waiting; 0: as many as the queue holds."""
    max_queued_tokens: Annotated[int, Field(ge=0)] = Tenant.max_queued_tokens
    """Prompt tokens that it may have waiting; 0: likewise."""
    max_running: Annotated[int, Field(ge=0)] = Tenant.max_running
    """Choices of its requests that may run at once; 0: as many as there are slots."""
    api_keys: Annotated[tuple[ApiKey, ...], Field(strict=False)] = ()
    """Its API keys: env:NAME of the variable that holds one, or sha256:HEX; with any, only they reach the tenant."""

    def tenant(self, name: str) -> Tenant:
        """As the orchestrator takes it."""
        return Tenant(
            name,
            weight=self.weight,
            max_queued=self.max_queued_requests,
            max_queued_tokens=self.max_queued_tokens,
            max_running=self.max_running,
            key_hashes=tuple(key.removeprefix("sha256:") for key in self.api_keys),
        )


class OrchestratorSection(Section):
    """What clients speak to."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Interface that the orchestrator listens on."""
    port: Port = 50051
    """Its port; 0 takes any free one."""
    metrics_port: Annotated[int, Field(ge=-1, le=65535)] = 0
    """Port of /metrics, for Prometheus; 0 takes any free one, which `baton status` shows; -1: no metrics."""
    cores: Cores = ()
    """Cores that it is pinned to; empty: not pinned."""
    max_queued_requests: Count = OrchestratorConfig.max_queued
    """Requests that may wait; beyond, those with the least claim are told when to come again."""
    max_queued_tokens: Count = OrchestratorConfig.max_queued_tokens
    """Prompt tokens that may wait, over all requests."""
    max_attempts: Count = OrchestratorConfig.max_attempts
    """Attempts at one request before its error is reported."""
    lease_ttl_s: Seconds = OrchestratorConfig.lease_ttl_s
    """Seconds that a reserved slot outlives the last push or renewal."""
    elastic: bool = OrchestratorConfig.elastic
    """Whether a prompt gets the ranks and the turn that cost all least; else all ranks, first come first served."""
    overtaking: Annotated[float, Field(ge=0, allow_inf_nan=False)] = OrchestratorConfig.overtaking
    """Part of its predicted time by which a prompt may be late for the sake of shorter ones that come after it."""
    disaggregation: Disaggregation = OrchestratorConfig.disaggregation
    """Who prefills: a chain (always), the generation group by itself (never), or whoever is predicted sooner (auto)."""
    trust_tenant_metadata: bool = False
    """Whether a call without a key may name its tenant (baton-tenant): for gateways that know who calls."""
    require_api_key: bool = False
    """Whether a call is refused that does not say who it is; else it is of the tenant "default"."""
    operator_keys: Annotated[tuple[ApiKey, ...], Field(strict=False)] = ()
    """Keys of those who drain, reload and calibrate: env:NAME or sha256:HEX; none: whoever is on this machine may."""
    model_folders: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Folders below which `baton reload --model` finds models; empty: model.cache, and that of the served model."""
    tenants: dict[Name, TenantSection] = {}
    """Who shares the queue, by name: each a section of its own, like [orchestrator.tenants.acme]."""

    @model_validator(mode="after")
    def _tenants_can_be_told_apart(self) -> Self:
        try:
            self.tenancy()
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self

    def tenancy(self) -> Tenants:
        """As the orchestrator takes it."""
        return Tenants(
            [section.tenant(name) for name, section in self.tenants.items()],
            trust_metadata=self.trust_tenant_metadata,
            require_key=self.require_api_key,
            operator_hashes=tuple(key.removeprefix("sha256:") for key in self.operator_keys),
        )

    def folders_of_models(self, served: Path, cache: Path) -> tuple[Path, ...]:
        """Return the folders below which operators may name a model, where that in `served` is configured."""
        beside = served.absolute().parent
        is_root = beside == beside.parent  # all of the machine is no folder of models
        default = (served.absolute() if is_root else beside, cache.absolute())
        return tuple(Path(each) for each in self.model_folders) or tuple(dict.fromkeys(default))

    @field_validator("model_folders")
    @classmethod
    def _absolute_folders(cls, model_folders: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_absolute(each) for each in model_folders)


class SupervisionSection(Section):
    """How workers are watched."""

    start_timeout_s: Seconds = LocalConfig.start_timeout_s
    """Seconds for a worker to load its model and answer."""
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
    """The Ray cluster that workers live in."""

    address: str = ""
    """host:port of a running Ray that declares baton_prefill and baton_generate, one a worker; empty: one is made."""
    object_store_mib: Annotated[int, Field(ge=75)] = 80
    """MiB of the object store of a Ray that is started here. Baton puts nothing of size into it."""


class ClusterConfig(Section):
    """All that `baton serve` brings up."""

    name: Name = "baton"
    """Name of the cluster: the namespace of its actors, and what `baton status` and `baton stop` call it."""
    worker_host: Annotated[str, Field(min_length=1)] = LocalConfig.host
    """Interface that workers, links and a Ray that is started here bind to."""
    model: ModelSection = Field(default_factory=ModelSection)
    prefill: PrefillSection = Field(default_factory=PrefillSection)
    generate: GenerateSection = Field(default_factory=GenerateSection)
    orchestrator: OrchestratorSection = Field(default_factory=OrchestratorSection)
    supervision: SupervisionSection = Field(default_factory=SupervisionSection)
    ray: RaySection = Field(default_factory=RaySection)

    @property
    def num_workers(self) -> int:
        """Ranks and engines; the orchestrator is not one."""
        return self.prefill.num_groups * self.prefill.num_ranks + self.generate.num_groups

    def worker(self, folder: Path, role: str, group: int, rank: int) -> WorkerConfig:
        """What one worker is told; `folder` holds the resolved model."""
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
    """The cluster's processes run in folders of their own."""
    return str(Path(path).expanduser().absolute()) if path else ""


def _check_cores(cores: tuple[tuple[int, ...], ...], num_workers: int, what: str) -> None:
    if cores and len(cores) != num_workers:
        raise ValueError(f"cores has {len(cores)} lists: give one for each of the {num_workers} {what}, or none")
    if not all(cores):
        raise ValueError("cores has an empty list: give each worker at least one core, or leave cores empty")
