"""Starts the server of a worker from its WorkerConfig: the one place that knows which host class belongs to which role.

Runs in the worker's process, on its asyncio loop.
"""

from pathlib import Path
from typing import Protocol

from deploy.config.worker import WorkerConfig


class Server(Protocol):
    """The server of a worker of either role."""

    port: int

    async def stop(self, grace_s: float = 0.0) -> None: ...


async def start_server(config: WorkerConfig) -> Server:
    """Load the model and start to serve. Raises a BatonError of one line when that fails."""
    folder = Path(config.model_folder)
    if config.role == "prefill":
        from prefill_workers.host import PrefillHost

        return await PrefillHost(
            model_folder=folder,
            dtype=config.dtype,
            quantization=config.quantization,
            num_threads=config.num_threads,
            cores=config.cores,
            host=config.host,
            watchdog_floor_s=config.watchdog_floor_s,
            cluster=config.cluster,
            prefix_share=config.prefix_share,
            prefix_disk=config.prefix_disk,
            prefix_disk_bytes=config.prefix_disk_bytes,
            kernels=config.kernels,
        ).start()
    from generate_workers.engine.core import EngineConfig
    from generate_workers.host import GenerationHost

    engine = EngineConfig(
        num_slots=config.num_slots,
        max_slot_tokens=config.max_slot_tokens,
        max_prefill_tokens_per_step=config.max_prefill_tokens_per_step,
        residency=config.residency,
        selection_file=config.selection_file,
        pool_tokens=config.pool_tokens,
        pool_eviction=config.pool_eviction,
        kv_memory_bytes=config.kv_memory_bytes,
        device_memory_bytes=config.device_memory_bytes,
        growth_tokens=config.growth_tokens,
        max_step_stretch=config.max_step_stretch,
        num_engines=config.num_engines,
    )
    return await GenerationHost(
        model_folder=folder,
        dtype=config.dtype,
        quantization=config.quantization,
        num_threads=config.num_threads,
        cores=config.cores,
        host=config.host,
        engine=engine,
        cluster=config.cluster,
        prefix_share=config.prefix_share,
        prefix_disk=config.prefix_disk,
        prefix_disk_bytes=config.prefix_disk_bytes,
        kernels=config.kernels,
    ).start()
