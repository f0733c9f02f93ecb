"""Configuration of a local relay."""

import os
from dataclasses import dataclass, fields
from pathlib import Path

from baton.settings.place import WorkerPlace
from baton.types import Dtype, KernelChoice, Quantization
from deploy.config.environment import use_threads
from deploy.config.worker import WorkerConfig
from generate_workers.config import EngineConfig
from orchestrator.requests.config import Disaggregation, OrchestratorConfig
from prefill_workers.config import PrefillConfig


@dataclass(frozen=True)
class LocalConfig:
    """Configuration of a relay in one process tree: `num_ranks` prefill ranks and one generation engine."""

    model_folder: Path
    """Hugging Face folder, already resolved and converted."""
    num_ranks: int = 2
    """Prefill ranks; 0: the generation engine prefills by itself (colocated)."""
    dtype: Dtype = "bfloat16"
    """Number format of weights, activations and KV: bfloat16 or float32."""
    quantization: Quantization = "none"
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

    def worker(self, role: str, rank: int) -> WorkerConfig:
        """Return the configuration of one worker of this relay."""
        threads = self.prefill_threads if role == "prefill" else use_threads(self.generate_threads)
        place = WorkerPlace(
            model_folder=self.model_folder,
            dtype=self.dtype,
            quantization=self.quantization,
            num_threads=threads,
            host=self.host,
            cluster=f"local-{os.getpid()}",
            prefix_share=self.prefix_share,
            kernels=self.kernels,
        )
        if role == "prefill":
            return WorkerConfig("prefill", 0, rank, place, PrefillConfig(watchdog_floor_s=self.watchdog_floor_s))
        names = {each.name for each in fields(EngineConfig)} & {each.name for each in fields(self)}
        return WorkerConfig("generate", 0, 0, place, EngineConfig(**{name: getattr(self, name) for name in names}))
