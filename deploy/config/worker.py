"""Configuration of one worker and of a local relay, validated once, where it is read."""

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from baton.errors import ConfigError
from baton.types import KernelChoice
from generate_workers.residency.traits import POLICIES, POOLED
from orchestrator.requests.config import DISAGGREGATION, Disaggregation, OrchestratorConfig

DTYPES = ("bfloat16", "float32")
QUANTIZATIONS = ("none", "int8")
"""Formats of quantized weights, and none."""
EVICTIONS = ("counter", "lru", "fifo")
"""Names of the ways to evict tokens from a pool of KV."""
DEFAULT_MODEL = "smollm2-135m"


def prepare_ray_environment() -> None:
    """Set Ray's environment variables; call it before ray is imported. Ray then writes no token to the user's home,
    sends no statistics, and prints nothing about either, nor about a worker that died: its supervisor reports that in
    one line."""
    os.environ.update(
        RAY_AUTH_MODE="disabled",
        RAY_USAGE_STATS_ENABLED="0",
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
        RAY_DEDUP_LOGS_SKIP_REGEX="^A worker died or was killed while executing a task",
    )


def read_variable(name: str) -> str:
    """Return the value of an environment variable, which holds a secret. Raises ConfigError when it is unset or
    empty."""
    value = os.environ.get(name, "").strip()
    if not value:
        raise ConfigError(f"environment variable {name} is not set: export it")
    return value


def use_threads(num_threads: int) -> int:
    """Return the number of threads to use: `num_threads`, or one for each core when it is 0."""
    return num_threads or os.cpu_count() or 1


@dataclass(frozen=True)
class WorkerConfig:
    """Configuration of one worker, passed to its process as a line of JSON."""

    role: str
    """Role of the worker: prefill or generate."""
    rank: int
    """Rank in the prefill group; 0 for the generation engine."""
    model_folder: str
    """Hugging Face folder, already resolved and converted."""
    dtype: str
    """Number format of weights, activations and KV: bfloat16 or float32."""
    num_threads: int
    """Threads of torch's matmuls in this process."""
    host: str
    """Interface that the worker's server and links bind to."""
    num_slots: int
    """Generation: rows in the batch."""
    max_slot_tokens: int
    """Generation: tokens that one slot may hold, prompt and output."""
    max_prefill_tokens_per_step: int
    """Generation: prompt tokens that are prefilled locally between two decode steps, at most."""
    watchdog_floor_s: float
    """Prefill: seconds without progress, at least, before the rank gives up its links, or counts as hanging."""
    quantization: str = "none"
    """Format of quantized weights: none or int8."""
    group: int = 0
    """Number of the worker's group among those of its role."""
    cores: tuple[int, ...] = ()
    """Cores that the process is pinned to; empty: not pinned."""
    residency: str = "device"
    """Generation: residency policy, which says where KV lives and what is attended to."""
    selection_file: str = ""
    """Generation: file that `baton prepare` wrote; empty: where it wrote for the model."""
    pool_tokens: int = 0
    """Generation: most tokens whose KV a row keeps in a layer that chooses keys; 0: all."""
    pool_eviction: str = "counter"
    """Generation: which token is evicted when pool_tokens is reached: counter, lru or fifo."""
    kv_memory_bytes: int = 0
    """Generation: bytes of KV over all slots; 0: derived from the free memory."""
    device_memory_bytes: int = 0
    """Generation: bytes of the device for weights and KV; 0: no limit."""
    max_step_stretch: float = 1.5
    """Generation: longest step with local prefill, as a multiple of the step's time without."""
    growth_tokens: int = 256
    """Generation: output tokens for which a row gets memory when it starts."""
    num_engines: int = 1
    """Generation: engines among which the machine's free memory is divided, where kv_memory_bytes is derived from
    it. All engines of the cluster count, as if they ran on one machine; on several, setting kv_memory_bytes is more
    exact."""
    cluster: str = ""
    """Name of the cluster whose workers on one node share a prefix store."""
    prefix_share: float = 0.0
    """Fraction of the size of /dev/shm that the prefix store may take; 0: no prefixes are kept."""
    prefix_disk: str = ""
    """Folder on disk for prefixes that have no room in /dev/shm."""
    prefix_disk_bytes: int = 0
    """Bytes that prefixes may take on the disk of each node; 0: none are kept there."""
    kernels: tuple[KernelChoice, ...] = ()
    """Kernels that the launcher chose for its kind of processor; a worker on another kind uses its own machine's
    choice."""

    @property
    def name(self) -> str:
        """Name of the worker: prefill-GROUP.RANK or generate-GROUP."""
        return f"{self.role}-{self.group}" + (f".{self.rank}" if self.role == "prefill" else "")

    def to_json(self) -> str:
        """Return the configuration as one line of JSON, which `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "WorkerConfig":
        fields = json.loads(line)
        kernels = tuple(KernelChoice(**each) for each in fields["kernels"])
        return cls(**{**fields, "cores": tuple(fields["cores"]), "kernels": kernels})


@dataclass(frozen=True)
class LocalConfig:
    """Configuration of a relay in one process tree: `num_ranks` prefill ranks and one generation engine."""

    model_folder: Path
    """Hugging Face folder, already resolved and converted."""
    num_ranks: int = 2
    """Prefill ranks; 0: the generation engine prefills by itself (colocated)."""
    dtype: str = "bfloat16"
    """Number format of weights, activations and KV: bfloat16 or float32."""
    quantization: str = "none"
    """none, or int8: weights rounded to half the bytes, which changes answers a little."""
    prefill_threads: int = 1
    """torch threads of each prefill rank."""
    generate_threads: int = 0
    """torch threads of the generation engine; 0: one for each core."""
    num_slots: int = 16
    """Rows in the batch of the generation engine."""
    max_slot_tokens: int = 8192
    """Tokens that one slot may hold, prompt and output."""
    max_prefill_tokens_per_step: int = 256
    """Prompt tokens that are prefilled locally between two decode steps, at most."""
    max_step_stretch: float = 1.5
    """Longest step with local prefill, as a multiple of the step's time without, where rows decode; inf: no bound."""
    disaggregation: Disaggregation = "always"
    """What prefills where there are ranks. Default: always their chain, so that it can be seen; auto and never have the
    meaning of orchestrator.disaggregation."""
    residency: str = "device"
    """Where KV lives: device or host, both memory of the CPU. All others approximate: fewer keys, 4 bits, or both."""
    selection_file: str = ""
    """File that `baton prepare` wrote, for policies that choose keys; empty: where it wrote for the model."""
    pool_tokens: int = 0
    """Most tokens whose KV a row keeps in each layer but the first two, with residency infinigen; 0: all."""
    pool_eviction: str = "counter"
    """Which token is evicted when pool_tokens is reached: counter, lru or fifo."""
    kv_memory_bytes: int = 0
    """Bytes of KV over all slots; 0: what all slots could hold, at most half of the memory free at the start."""
    device_memory_bytes: int = 0
    """Limit in bytes of weights and KV, as on a device with that memory; only counted. 0: no limit but that of KV."""
    growth_tokens: int = 256
    """Output tokens for which a row gets memory when it starts."""
    host: str = "127.0.0.1"
    """Interface that all workers bind to."""
    start_timeout_s: float = 120.0
    """Seconds in which a worker must load its model and answer."""
    heartbeat_s: float = 1.0
    """Seconds between two heartbeats."""
    dead_after_s: float = 5.0
    """Seconds without an answered heartbeat after which a worker is killed and replaced."""
    watchdog_floor_s: float = 2.0
    """Seconds without progress, at least, before a rank gives up its links, or is killed as hanging."""
    prefix_share: float = 0.1
    """Fraction of the size of /dev/shm for KV of earlier prompts, reused by prompts that begin alike; 0: none is
    kept."""
    lease_ttl_s: float = OrchestratorConfig.lease_ttl_s
    """Seconds after the last push or renewal until a reserved slot is freed."""
    max_attempts: int = OrchestratorConfig.max_attempts
    """Attempts at one request before its error is reported."""
    kernels: tuple[KernelChoice, ...] = ()
    """Kernels that the launcher chose for this kind of processor; empty: what this machine has kept."""

    def __post_init__(self) -> None:
        self._require(0 <= self.num_ranks <= 64, "num_ranks", "use 0 (colocated) to 64")
        self._require(self.dtype in DTYPES, "dtype", f"use one of {', '.join(DTYPES)}")
        self._require(self.quantization in QUANTIZATIONS, "quantization", f"use one of {', '.join(QUANTIZATIONS)}")
        positive = ("num_slots", "max_slot_tokens", "prefill_threads", "max_prefill_tokens_per_step", "max_attempts")
        for name in (*positive, "growth_tokens"):
            self._require(getattr(self, name) >= 1, name, "use at least 1")
        self._require(self.max_step_stretch >= 1, "max_step_stretch", "use 1 or more, inf for no bound")
        self._require(
            self.disaggregation in DISAGGREGATION, "disaggregation", f"use one of {', '.join(DISAGGREGATION)}"
        )
        self._require(self.residency in POLICIES, "residency", f"use one of {', '.join(POLICIES)}")
        self._require(self.pool_tokens >= 0, "pool_tokens", "use 0 (all are kept) or more")
        has_pool = POLICIES[self.residency].has_pool
        self._require(has_pool or not self.pool_tokens, "pool_tokens", f"use 0, or {POOLED}")
        self._require(self.pool_eviction in EVICTIONS, "pool_eviction", f"use one of {', '.join(EVICTIONS)}")
        for name in ("kv_memory_bytes", "device_memory_bytes"):
            self._require(getattr(self, name) >= 0, name, "use 0 (derived) or more")
        self._require(0 <= self.prefix_share <= 1, "prefix_share", "use a part of 1, or 0 to keep nothing")
        self._require(self.generate_threads >= 0, "generate_threads", "use 0 (all cores) or more")
        for field in fields(self):
            if field.name.endswith("_s"):
                self._require(getattr(self, field.name) > 0, field.name, "use a time above 0 seconds")
        self._require(self.dead_after_s > self.heartbeat_s, "dead_after_s", "use more than heartbeat_s")

    def worker(self, role: str, rank: int) -> WorkerConfig:
        """Return the configuration of one worker of this relay."""
        threads = self.prefill_threads if role == "prefill" else use_threads(self.generate_threads)
        return WorkerConfig(
            role=role,
            rank=rank,
            model_folder=str(self.model_folder),
            dtype=self.dtype,
            quantization=self.quantization,
            num_threads=threads,
            host=self.host,
            num_slots=self.num_slots,
            max_slot_tokens=self.max_slot_tokens,
            max_prefill_tokens_per_step=self.max_prefill_tokens_per_step,
            residency=self.residency,
            selection_file=self.selection_file,
            pool_tokens=self.pool_tokens,
            pool_eviction=self.pool_eviction,
            kv_memory_bytes=self.kv_memory_bytes,
            device_memory_bytes=self.device_memory_bytes,
            max_step_stretch=self.max_step_stretch,
            growth_tokens=self.growth_tokens,
            watchdog_floor_s=self.watchdog_floor_s,
            cluster=f"local-{os.getpid()}",
            prefix_share=self.prefix_share,
            kernels=self.kernels,
        )

    def _require(self, holds: bool, name: str, remedy: str) -> None:
        if not holds:
            raise ConfigError(f"{name} = {getattr(self, name)!r} is out of range: {remedy}")
