"""Starts the server of a worker from its WorkerConfig. Only this module knows the server class of each role.

A process can serve as several workers, one after another. The model stays loaded if the next worker uses the same
model. Runs in the worker's process, on its asyncio loop.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from baton.process.garbage import collect_all
from baton.process.own_thread import in_own_thread
from baton.transport.identity import ClusterSecret
from deploy.config.worker import WorkerConfig
from deploy.machine.device_profile import worker_profile
from generate_workers.config import EngineConfig
from orchestrator.requests.config import OrchestratorConfig
from prefill_workers.config import PrefillConfig

if TYPE_CHECKING:
    from baton.modeling.hosting import LoadedModel

_GRACE_S = 2.0
"""Seconds within which running calls must end when a process changes its role. Such calls are heartbeats, and calls of
other nodes that fetch cached KV."""


class Server(Protocol):
    """Interface of the server that runs in a worker's process. It is the same for all roles."""

    port: int

    async def stop(self, grace_s: float = 0.0) -> None: ...


StartServer = Callable[[WorkerConfig, "LoadedModel | None"], Awaitable[Server]]
"""Type of a function that starts the server of a worker. Its second argument contains the model of the process, which
may not be loaded yet; None in an orchestrator's process, which loads no model. Raises BatonError with one line of text
if the server cannot be started."""


async def start_server(config: WorkerConfig, model: "LoadedModel | None" = None) -> Server:
    """Start the server of a worker. The profile of the worker's device is found first. Then the worker's model is
    loaded, unless `model` already contains it. Raises BatonError with one line of text if the server cannot be
    started."""
    secret = ClusterSecret(config.place.secret)  # refused here, before a model is loaded
    match config.section:
        case PrefillConfig() as section:
            from prefill_workers.host import start_rank

            profile = await in_own_thread(partial(worker_profile, config.place))
            return await start_rank(config.place, section, model, profile)
        case EngineConfig() as section:
            from generate_workers.host import start_engine

            profile = await in_own_thread(partial(worker_profile, config.place))
            return await start_engine(config.place, section, model, profile)
        case OrchestratorConfig() as section:
            from orchestrator.api.host import OrchestratorHost

            place = config.place
            host = OrchestratorHost(place.model_folder, section, host=place.host, secret=secret, cores=place.cores)
            return await host.start()


class WorkerHost:
    """Owner of the server that runs in a worker's process. The server can be replaced by one of another role. Must be
    used by one task at a time."""

    def __init__(self, start: StartServer = start_server, note: str = "") -> None:
        """Create a WorkerHost that does not run a server yet. `start` is the function that starts servers. `note` is
        the path of the file to which the process writes a note if it crashes."""
        self._start = start
        self._note = note
        self._model: LoadedModel | None = None
        """Model that the process has loaded. None before the first worker, and in an orchestrator's process, which does
        not use torch."""
        self._server: Server | None = None

    async def serve(self, config: WorkerConfig) -> int:
        """Stop the current server, if any, and free everything except the loaded model. Then start a server with this
        configuration, and return its port. Raises BatonError with one line of text if the server cannot be started;
        then no server runs."""
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
        """Stop the current server, if any. Idempotent."""
        if self._server is not None:
            await self._server.stop()
