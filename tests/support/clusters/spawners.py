"""A spawner of workers that are real servers in this process: made in milliseconds, and ended at a test's will."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from baton.clock import SystemClock
from baton.errors import UnavailableError
from baton.settings.place import WorkerPlace
from deploy.config.worker import WorkerConfig
from generate_workers.config import EngineConfig
from generate_workers.servicer import GenerationServer
from modeling.forward.decoder import Decoder
from orchestrator.api.host import OrchestratorHost
from orchestrator.requests.config import OrchestratorConfig
from prefill_workers.config import PrefillConfig
from prefill_workers.servicer import PrefillServer
from tests.support.models.tiny_models import random_decoder
from tests.support.models.tiny_tokenizer import letter_tokenizer
from tests.support.wire.secret import SECRET
from transport.identity import ClusterSecret

HOST = "127.0.0.1"


NONE = Path("none")


def tiny_worker(role: str, rank: int = 0, group: int = 0, folder: Path = NONE) -> WorkerConfig:
    """What such a worker is told."""
    place = WorkerPlace(model_folder=folder, dtype="float32", host=HOST, prefix_share=0.0, secret=SECRET.text)
    if role == "prefill":
        return WorkerConfig("prefill", group, rank, place, PrefillConfig(watchdog_floor_s=5.0))
    return WorkerConfig("generate", group, rank, place, EngineConfig(num_slots=2, max_slot_tokens=64))


def orchestrator_worker(
    folder: Path, config: OrchestratorConfig | None = None, secret: ClusterSecret = SECRET
) -> WorkerConfig:
    """What an orchestrator's process is told; `folder` holds the tokenizer."""
    place = WorkerPlace(model_folder=folder, host=HOST, secret=secret.text)
    return WorkerConfig("orchestrator", 0, 0, place, config or OrchestratorConfig())


InProcessServer = PrefillServer | GenerationServer | OrchestratorHost


class InProcessWorker:
    """One server after another. Implements WorkerHandle; nothing here can be stopped without being ended."""

    def __init__(
        self,
        config: WorkerConfig,
        server: InProcessServer,
        serve: Callable[[WorkerConfig], Awaitable[InProcessServer]],
    ) -> None:
        """`serve` starts the next server."""
        self.config = config
        self.endpoint = f"{HOST}:{server.port}"
        self.pid = 0
        self.server = server
        self._serve = serve
        self._ending: asyncio.Task[None] | None = None
        self._over = asyncio.Event()

    @property
    def ended(self) -> bool:
        return self._over.is_set()

    async def wait(self) -> str:
        await self._over.wait()
        return "a word"

    async def serve_as(self, config: WorkerConfig) -> None:
        if self._ending is not None:
            raise UnavailableError(f"{config.name} ended before it served")
        await self.server.stop()
        try:
            self.server = await self._serve(config)
        except BaseException:
            self._over.set()
            raise
        self.config, self.endpoint = config, f"{HOST}:{self.server.port}"
        if self._ending is not None:  # killed meanwhile
            await self.server.stop()
            raise UnavailableError(f"{config.name} ended before it served")

    def kill(self) -> None:
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())

    async def close(self) -> None:
        self.kill()
        await self.wait()

    async def _end(self) -> None:
        await self.server.stop()
        self._over.set()


class InProcessSpawner:
    """Makes workers of one tiny model. Implements Spawner."""

    def __init__(self) -> None:
        self.made: list[InProcessWorker] = []
        """All that were made, in order."""
        self.failures: list[Exception] = []
        """Raised instead of making a worker, one for each start."""
        self.failures_in_new_roles: list[Exception] = []
        """Raised by a worker instead of serving in a new role, one for each try."""
        self.decoders: dict[str, Decoder] = {}
        """For workers that are to have another model, by name or model folder."""
        self.prefix_folder: Path | None = None
        """Where prefill ranks keep prefixes."""
        self.found: InProcessWorker | None = None
        """A worker that an earlier supervisor left, which is returned in place of a new one."""

    async def start(self, config: WorkerConfig) -> InProcessWorker:
        if self.failures:
            raise self.failures.pop(0)
        if self.found is not None:
            return self.found
        self.made.append(InProcessWorker(config, await self._serve(config), self._serve_again))
        return self.made[-1]

    async def _serve_again(self, config: WorkerConfig) -> InProcessServer:
        if self.failures_in_new_roles:
            raise self.failures_in_new_roles.pop(0)
        return await self._serve(config)

    async def _serve(self, config: WorkerConfig) -> InProcessServer:
        folder = str(config.place.model_folder)
        decoder = self.decoders.get(config.name) or self.decoders.get(folder) or random_decoder()
        server: InProcessServer
        if config.role == "prefill":
            server = await PrefillServer.start(
                decoder, clock=SystemClock(), host=HOST, secret=SECRET, prefix_folder=self.prefix_folder
            )
        elif isinstance(config.section, OrchestratorConfig):
            server = await OrchestratorHost(config.place.model_folder, config.section, host=HOST, secret=SECRET).start()
        else:
            assert isinstance(config.section, EngineConfig)
            server = await GenerationServer.start(
                decoder, letter_tokenizer(), config.section, clock=SystemClock(), host=HOST, secret=SECRET
            )
        return server
