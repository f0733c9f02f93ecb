"""Workers for tests, and their spawner. A worker is a real server in this process, and starts within milliseconds.

Workers serve a tiny model. Optionally, they have gates, an emulated device, a prefix store, or faults of links and
senders.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from baton.errors import UnavailableError
from baton.modeling.device.cpu import CpuDevice
from baton.modeling.forward.decoder import Decoder
from baton.modeling.hosting import PrefixPlace
from baton.modeling.prefix_store.node import DiskPlace
from baton.planning.device_profile import DeviceProfile
from baton.process.crash_notes import Crash
from baton.settings.place import WorkerPlace
from baton.transport.identity import ClusterSecret
from baton_lab.chaos.faults import FaultPlan
from deploy.config.worker import Section, WorkerConfig
from generate_workers.config import EngineConfig
from generate_workers.engine.served_model import ServedModel
from generate_workers.servicer import GenerationServer
from orchestrator.api.host import OrchestratorHost
from orchestrator.requests.config import OrchestratorConfig
from prefill_workers.config import PrefillConfig
from prefill_workers.engine import PrefillEngine
from prefill_workers.servicer import PrefillServer
from tests.support.clusters.clients import CLOCK, HOST
from tests.support.engines.devices import PoisonedDevice
from tests.support.engines.gated_kernels import Gate
from tests.support.engines.generation import eos_decoder
from tests.support.engines.prefixes import PLENTY
from tests.support.models.tiny_tokenizer import letter_grammars, letter_tokenizer
from tests.support.wire.faulty_ports import FaultyEngine
from tests.support.wire.secret import PLACE, SECRET

NONE = Path("none")
_SECTIONS: dict[str, Section] = {
    "prefill": PrefillConfig(watchdog_floor_s=5.0),
    "generate": EngineConfig(num_slots=2, max_slot_tokens=64),
}


def tiny_worker(
    role: str, rank: int = 0, group: int = 0, folder: Path = NONE, section: Section | None = None
) -> WorkerConfig:
    """Return the configuration of a worker in this process. `section`: settings of its role; None: the default."""
    place = WorkerPlace(model_folder=folder, dtype="float32", host=HOST, prefix_share=0.0, secret=SECRET.text)
    return WorkerConfig("prefill" if role == "prefill" else "generate", group, rank, place, section or _SECTIONS[role])


def orchestrator_worker(
    folder: Path, config: OrchestratorConfig | None = None, secret: ClusterSecret = SECRET
) -> WorkerConfig:
    """Return the configuration of an orchestrator's process; `folder` holds the tokenizer."""
    place = WorkerPlace(model_folder=folder, host=HOST, secret=secret.text)
    return WorkerConfig("orchestrator", 0, 0, place, config or OrchestratorConfig())


InProcessServer = PrefillServer | GenerationServer | OrchestratorHost


class InProcessWorker:
    """Runs one server after another in this process. Implements WorkerHandle."""

    def __init__(
        self,
        config: WorkerConfig,
        server: InProcessServer,
        serve: Callable[[WorkerConfig], Awaitable[InProcessServer]],
    ) -> None:
        """Create a worker that runs `server`. `serve` starts the next server when the worker's role changes."""
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

    async def crash(self) -> Crash | None:
        return None

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
        if self._ending is not None:  # the worker was killed meanwhile
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


@dataclass
class InProcessSpawner:
    """Spawner of workers that serve one tiny model. Implements Spawner."""

    decoder: Decoder = field(default_factory=eos_decoder)
    gates: dict[str, Gate] | None = None
    """Gates in front of the attention kernels of workers, by worker name. None: workers have no gates, and use native
    kernels."""
    is_emulated: bool = False
    """True if each worker computes on its own emulated device."""
    faults: FaultPlan | None = None
    """Plan of faults for the links and senders of ranks; None: no faults."""
    may_share: bool = True
    """True if ranks with faults may push through shared memory."""
    folders: dict[str, Path | None] = field(default_factory=dict)
    """Folders of prefix stores, by worker name or role; other workers have no store."""
    prefix_bytes: int = PLENTY
    """Size limit in bytes of each folder."""
    prefix_disk: DiskPlace | None = None
    made: list[InProcessWorker] = field(default_factory=list)
    """All workers that were made, in order."""
    failures: list[Exception] = field(default_factory=list)
    """Exceptions that the next calls of `start` raise, one per call."""
    failures_in_new_roles: list[Exception] = field(default_factory=list)
    """Exceptions that the next changes of a worker's role raise, one per change."""
    decoders: dict[str, Decoder] = field(default_factory=dict)
    """Models of workers that do not serve `decoder`, by worker name or model folder."""
    profiles: dict[str, DeviceProfile] = field(default_factory=dict)
    """Profiles of the workers' devices, by worker name; other workers report none."""
    found: InProcessWorker | None = None
    """Worker that an earlier supervisor has started. `start` returns it in place of a new one."""

    async def start(self, config: WorkerConfig) -> InProcessWorker:
        if self.failures:
            raise self.failures.pop(0)
        if self.found is not None:
            return self.found
        self.made.append(InProcessWorker(config, await self._serve(config), self._serve_again))
        return self.made[-1]

    async def _rank(self, config: WorkerConfig) -> PrefillServer:
        """Start the server of a prefill rank."""
        decoder = self._model(config)
        if self.faults is not None:
            return await self._faulty_rank(decoder, self._prefixes(config), self.faults)
        engine = PrefillEngine(decoder, CLOCK, PrefillConfig())
        prefixes, grammars = self._prefixes(config), letter_grammars()
        return await PrefillServer.start(
            engine, PLACE, prefixes=prefixes, grammars=grammars, profile=self.profiles.get(config.name)
        )

    async def _engine(self, config: WorkerConfig) -> GenerationServer:
        """Start the server of a generation group."""
        assert isinstance(config.section, EngineConfig)
        return await GenerationServer.start(
            ServedModel(self._model(config), letter_tokenizer(), profile=self.profiles.get(config.name)),
            PLACE,
            config.section,
            clock=CLOCK,
            prefix_place=self._prefixes(config),
        )

    async def _serve_again(self, config: WorkerConfig) -> InProcessServer:
        if self.failures_in_new_roles:
            raise self.failures_in_new_roles.pop(0)
        return await self._serve(config)

    async def _serve(self, config: WorkerConfig) -> InProcessServer:
        if isinstance(config.section, OrchestratorConfig):
            return await OrchestratorHost(config.place.model_folder, config.section, host=HOST, secret=SECRET).start()
        return await (self._rank(config) if config.role == "prefill" else self._engine(config))

    def _model(self, config: WorkerConfig) -> Decoder:
        made = self.decoders.get(config.name) or self.decoders.get(str(config.place.model_folder)) or self.decoder
        if self.gates is None and not self.is_emulated:
            return made
        gate = None
        if self.gates is not None:
            gate = self.gates[config.name] = Gate(made.kernel)
        device = PoisonedDevice() if self.is_emulated else CpuDevice()
        return Decoder(made.config, made.weights, gate, device=device)

    def _prefixes(self, config: WorkerConfig) -> PrefixPlace | None:
        folder = self.folders.get(config.name) or self.folders.get(config.role)
        return None if folder is None else PrefixPlace(folder, self.prefix_bytes, self.prefix_disk)

    async def _faulty_rank(self, decoder: Decoder, prefixes: PrefixPlace | None, plan: FaultPlan) -> PrefillServer:
        engine = FaultyEngine(decoder, CLOCK, plan, watchdog_floor_s=2.0, repeats=prefixes is None)
        return await PrefillServer.start(engine, PLACE, prefixes=prefixes, may_share=self.may_share)
