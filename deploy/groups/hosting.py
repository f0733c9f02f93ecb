"""Starts the server of a worker from its WorkerConfig: the one place that knows which host belongs to which role.

Runs in the worker's process, on its asyncio loop.
"""

from typing import Protocol

from deploy.config.worker import WorkerConfig
from generate_workers.config import EngineConfig
from orchestrator.requests.config import OrchestratorConfig
from prefill_workers.config import PrefillConfig
from transport.identity import ClusterSecret


class Server(Protocol):
    """The server of a worker of any role."""

    port: int

    async def stop(self, grace_s: float = 0.0) -> None: ...


async def start_server(config: WorkerConfig) -> Server:
    """Load the model and start to serve. Raises a BatonError of one line when that fails."""
    match config.section:
        case PrefillConfig() as section:
            from prefill_workers.host import start_rank

            return await start_rank(config.place, section)
        case EngineConfig() as section:
            from generate_workers.host import start_engine

            return await start_engine(config.place, section)
        case OrchestratorConfig() as section:
            from orchestrator.api.host import OrchestratorHost

            place, secret = config.place, ClusterSecret(config.place.secret)
            host = OrchestratorHost(place.model_folder, section, host=place.host, secret=secret, cores=place.cores)
            return await host.start()
