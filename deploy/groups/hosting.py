"""Starts the server of a worker from its WorkerConfig. Only this module knows which server class belongs to which role.

A process may serve as several workers, one after another. The model stays loaded if the next worker has the same model.
Runs in the worker's process, on its asyncio loop.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from baton.process.garbage import collect_all
from baton.transport.identity import ClusterSecret
from deploy.config.worker import WorkerConfig
from generate_workers.config import EngineConfig
from orchestrator.requests.config import OrchestratorConfig
from prefill_workers.config import PrefillConfig

if TYPE_CHECKING:
    from baton.modeling.hosting import LoadedModel

_GRACE_S = 2.0
"""Seconds that running calls (heartbeats, and fetches by other nodes) have to end when a process takes another role."""


class Server(Protocol):
    """Server of a worker of any role."""

    port: int

    async def stop(self, grace_s: float = 0.0) -> None: ...


StartServer = Callable[[WorkerConfig, "LoadedModel | None"], Awaitable[Server]]
"""Function that starts the server of a worker. The second argument holds the model that the process has loaded, if any.
Raises BatonError with a text of one line."""


async def start_server(config: WorkerConfig, model: "LoadedModel | None" = None) -> Server:
    """Start to serve. Load the worker's model first, unless `model` already holds it. Raises BatonError with a text of
    one line if that fails."""
    secret = ClusterSecret(config.place.secret)  # refused here, before a model is loaded
    match config.section:
        case PrefillConfig() as section:
            from prefill_workers.host import start_rank

            return await start_rank(config.place, section, model)
        case EngineConfig() as section:
            from generate_workers.host import start_engine

            return await start_engine(config.place, section, model)
        case OrchestratorConfig() as section:
            from orchestrator.api.host import OrchestratorHost

            place = config.place
            host = OrchestratorHost(place.model_folder, section, host=place.host, secret=secret, cores=place.cores)
            return await host.start()


class WorkerHost:
    """The current server of a process. Used by one task at a time."""

    def __init__(self, start: StartServer = start_server, note: str = "") -> None:
        """Make a host that does not serve yet. `start` makes its servers; `note` is the path of the process's crash
        note."""
        self._start = start
        self._note = note
        self._model: LoadedModel | None = None
        """The model that the process has loaded; None in an orchestrator's process, which needs no torch."""
        self._server: Server | None = None

    async def serve(self, config: WorkerConfig) -> int:
        """Stop the current server, if any, and free everything that it holds except the model. Then start a server with
        this configuration and return its port. If that fails, raises BatonError with a text of one line; then no server
        runs."""
        if self._server is not None:
            await self._server.stop(_GRACE_S)
            self._server = None
            collect_all()
        if self._model is None and config.role != "orchestrator":
            from baton.modeling.hosting import LoadedModel

            self._model = LoadedModel()
        place = replace(config.place, crash_note=self._note)
        self._server = await self._start(replace(config, place=place), self._model)
        return self._server.port

    async def stop(self) -> None:
        """End the server, if there is one. Idempotent."""
        if self._server is not None:
            await self._server.stop()
