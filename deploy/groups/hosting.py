"""Hosts the server of a worker, made from its WorkerConfig: the one place that knows which host belongs to which role.

A process may serve as one worker after another: the model stays loaded while they have the same. Runs in the worker's
process, on its asyncio loop.
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
"""Seconds that running calls have to end when a process takes another role: heartbeats, and fetches by other nodes."""


class Server(Protocol):
    """The server of a worker of any role."""

    port: int

    async def stop(self, grace_s: float = 0.0) -> None: ...


StartServer = Callable[[WorkerConfig, "LoadedModel | None"], Awaitable[Server]]
"""Starts the server of a worker, with the model that its process has loaded, if any. Raises a BatonError of one
line."""


async def start_server(config: WorkerConfig, model: "LoadedModel | None" = None) -> Server:
    """Load the worker's model unless `model` has it, and start to serve. Raises a BatonError of one line when that
    fails."""
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
    """The server that a process has now. Used by one task at a time."""

    def __init__(self, start: StartServer = start_server, note: str = "") -> None:
        """Make a host that does not serve yet. `start` makes its servers; `note` is the process's crash note."""
        self._start = start
        self._note = note
        self._model: LoadedModel | None = None
        """The model of the process; None in an orchestrator's, which needs no torch."""
        self._server: Server | None = None

    async def serve(self, config: WorkerConfig) -> int:
        """Stop the present server, if any, and free all that it holds except the model. Then start a server with this
        configuration and return its port. Raises a BatonError of one line when that fails; then nothing is served."""
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
