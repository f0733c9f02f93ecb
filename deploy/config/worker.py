"""Configuration of a local relay, validated once, where it enters."""

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from baton.errors import ConfigError
from baton.types import KernelChoice
from orchestrator.requests.config import DISAGGREGATION, Disaggregation, OrchestratorConfig

DTYPES = ("bfloat16", "float32")
QUANTIZATIONS = ("none", "int8")
"""Of weights."""
POLICIES = ("device", "host", "infinigen", "infinigen_int4", "window", "oracle", "h2o", "int4")
"""Of residency."""
EVICTIONS = ("counter", "lru", "fifo")
"""From pools of KV."""
DEFAULT_MODEL = "smollm2-135m"


def prepare_ray_environment() -> None:
    """Before ray is imported: no token in the user's home, no statistics sent, no noise about either, and none about a
    worker that died: its supervisor says so in one line."""
    os.environ.update(
        RAY_AUTH_MODE="disabled",
        RAY_USAGE_STATS_ENABLED="0",
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
        RAY_DEDUP_LOGS_SKIP_REGEX="^A worker died or was killed while executing a task",
    )


def read_variable(name: str) -> str:
    """The value of an environment variable, which holds a secret. Raises ConfigError when it is unset or empty."""
    value = os.environ.get(name, "").strip()
    if not value:
        raise ConfigError(f"environment variable {name} is not set: export it")
    return value


def use_threads(num_threads: int) -> int:
    """The number itself; for 0, one for each core."""
    return num_threads or os.cpu_count() or 1


@dataclass(frozen=True)
class WorkerConfig:
    """What one worker is told, as a line of JSON."""

    role: str
    """prefill or generate."""
    rank: int
    """Place in the prefill group; 0 for the generation engine."""
    model_folder: str
    """Hugging Face folder, already resolved and converted."""
    dtype: str
    """bfloat16 or float32."""
    num_threads: int
    """Threads of torch's matmuls in this process."""
    host: str
    """Interface that the worker's server and links bind to."""
    num_slots: int
    """Generation: rows in the batch."""
    max_slot_tokens: int
    """Generation: tokens that one slot may hold, prompt and output."""
    max_prefill_tokens_per_step: int
    """Generation: tokens of local prefill between two decode steps."""
    watchdog_floor_s: float
    """Prefill: seconds without progress, at least, before the links are given up, or the rank as one that hangs."""
    quantization: str = "none"
    """none, or int8: of weights."""
    group: int = 0
    """Which of the groups of its role."""
    cores: tuple[int, ...] = ()
    """Cores that the process is pinned to; empty: not pinned."""
    residency: str = "device"
    """Generation: where KV lives, and which of it is attended to."""
    selection_file: str = ""
    """Generation: what `baton prepare` wrote; empty: where it wrote for the model."""
    pool_tokens: int = 0
    """Generation: most tokens of KV that a row keeps in a layer that chooses keys; 0: all."""
    pool_eviction: str = "counter"
    """Generation: who goes then."""
    kv_memory_bytes: int = 0
    """Generation: of KV, over all slots; 0: derived."""
    device_memory_bytes: int = 0
    """Generation: of the device, for weights and KV; 0: no limit."""
    max_step_stretch: float = 1.5
    """Generation: how many times as long a step may take for the sake of local prefill."""
    growth_tokens: int = 256
    """Generation: by which a row is expected to grow yet, when it is taken on."""
    num_engines: int = 1
    """Generation: engines among which a machine's free memory is divided, where that decides: all of the cluster, as if
    it were one machine. With several, that is cautious: kv_memory_bytes says it exactly."""
    cluster: str = ""
    """Whose prefixes its node keeps, and all of the cluster's workers there share."""
    prefix_share: float = 0.0
    """Part of /dev/shm, of all that fits there, that they may take; 0: none are kept."""
    prefix_disk: str = ""
    """Folder for what has no room there."""
    prefix_disk_bytes: int = 0
    """That they may take there, on each node; 0: nothing is kept there."""
    kernels: tuple[KernelChoice, ...] = ()
    """Chosen by the launcher for its kind of processor; a worker on another kind uses what its own machine has kept."""

    @property
    def name(self) -> str:
        """prefill-GROUP.RANK or generate-GROUP."""
        return f"{self.role}-{self.group}" + (f".{self.rank}" if self.role == "prefill" else "")

    def to_json(self) -> str:
        """One line; `from_json` reads it back."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "WorkerConfig":
        fields = json.loads(line)
        kernels = tuple(KernelChoice(**each) for each in fields["kernels"])
        return cls(**{**fields, "cores": tuple(fields["cores"]), "kernels": kernels})


@dataclass(frozen=True)
class LocalConfig:
    """A relay in one process tree: `num_ranks` prefill ranks and one generation engine."""

    model_folder: Path
    """Hugging Face folder, already resolved and converted."""
    num_ranks: int = 2
    """Prefill ranks; 0 means colocated: the generation engine prefills by itself."""
    dtype: str = "bfloat16"
    """bfloat16 or float32, for weights, activations and KV."""
    quantization: str = "none"
    """none, or int8: weights rounded to half the bytes, which changes answers a little."""
    prefill_threads: int = 1
    """torch threads of each prefill rank."""
    generate_threads: int = 0
    """torch threads of the generation engine; 0: one for each core."""
    num_slots: int = 16
    """Rows in the generation batch."""
    max_slot_tokens: int = 8192
    """Tokens that one slot may hold, prompt and output."""
    max_prefill_tokens_per_step: int = 256
    """Tokens of local prefill between two decode steps."""
    max_step_stretch: float = 1.5
    """How many times as long a step may take for the sake of local prefill, where rows decode; inf: no bound."""
    disaggregation: Disaggregation = "always"
    """Who prefills, where there are ranks: their chain, always, so that it can be seen; auto or never, as
    orchestrator.disaggregation."""
    residency: str = "device"
    """Where KV lives: device or host, both memory of the CPU. Others are approximate: some keys, 4 bits, or both."""
    selection_file: str = ""
    """What `baton prepare` wrote, for approximate policies; empty: where it wrote for the model."""
    pool_tokens: int = 0
    """Most tokens of KV that a row keeps in each layer but the first two, by residency infinigen; 0: all."""
    pool_eviction: str = "counter"
    """Who goes then: counter, lru or fifo."""
    kv_memory_bytes: int = 0
    """Bytes of KV over all slots; 0: what all slots could hold, at most half of the memory free at the start."""
    device_memory_bytes: int = 0
    """Bytes for weights and KV that count as a device's, by accounts alone; 0: no limit but that of KV."""
    growth_tokens: int = 256
    """Tokens by which a row is expected to grow yet, when it is taken on."""
    host: str = "127.0.0.1"
    """Interface that all workers bind to."""
    start_timeout_s: float = 120.0
    """Seconds for a worker to load its model and answer."""
    heartbeat_s: float = 1.0
    """Seconds between two heartbeats."""
    dead_after_s: float = 5.0
    """Seconds without an answered heartbeat after which a worker is killed and replaced."""
    watchdog_floor_s: float = 2.0
    """Seconds without progress on a rank, at least, before the links' life is ended, or the rank's."""
    prefix_share: float = 0.1
    """Part of /dev/shm, of all that fits there, that KV of earlier prompts may take, for later ones that begin alike;
    0: none is kept."""
    lease_ttl_s: float = OrchestratorConfig.lease_ttl_s
    """Seconds a reserved slot outlives the last push or renewal."""
    max_attempts: int = OrchestratorConfig.max_attempts
    """Attempts at one request before its error is reported."""
    kernels: tuple[KernelChoice, ...] = ()
    """Chosen by the launcher for this kind of processor; empty: what this machine has kept."""

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
        self._require(self.residency == "infinigen" or not self.pool_tokens, "pool_tokens", "use 0, or infinigen")
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
        """The part of this that one worker needs."""
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
