"""The product's worker process with a paced engine. deploy.groups.processes starts it as `python -m
tests.support.paced.worker`. It reads the simulated hardware from the model's folder."""

import asyncio
import json
import sys
from dataclasses import replace

from baton.modeling.forward.decoder import Decoder
from baton.modeling.hosting import LoadedModel
from baton.process.clock import SystemClock
from baton.process.garbage import collect_rarely
from baton.settings.place import WorkerPlace
from baton.text.tokenizer import Tokenizer
from baton.transport.channel import bind, make_server
from baton.transport.identity import ClusterSecret
from baton.transport.kv_receiver import KvReceiverServicer
from baton.transport.terms import SeenTerms
from baton.v1 import generate_pb2_grpc
from deploy.config.worker import WorkerConfig
from deploy.groups import worker_process
from deploy.groups.hosting import Server
from generate_workers.config import EngineConfig
from generate_workers.engine.chunked_prefill import ChunkedPrefillPolicy
from generate_workers.engine.core import GenerationEngine
from generate_workers.engine.memory_limits import make_memory
from generate_workers.engine.preemption import RunningRows
from generate_workers.engine.served_model import ServedModel
from generate_workers.servicer import GenerationServer, GenerationServicer
from generate_workers.slots.table import SlotTable
from prefill_workers.config import PrefillConfig
from prefill_workers.servicer import PrefillServer
from tests.support.paced.engines import PacedPolicy, PacedPrefillEngine, PacedStepDecoder, PacedSteps
from tests.support.paced.hardware import PacedHardware

SLOWER_GROUPS = "slower.json"
"""Name of the file, in the model's folder, with the factor by which prefill groups are slower, by name of the group."""


async def start_paced(config: WorkerConfig, model: LoadedModel | None) -> Server:
    """Start the server of a worker of either role. The worker does not store prefixes. If the model's folder has the
    file `SLOWER_GROUPS`, prefill groups that it names are slower, and ranks report a profile."""
    assert model is not None
    decoder = await asyncio.to_thread(model.load, config.place)
    hardware, profile = PacedHardware.load(config.place.model_folder), None
    if (slower := config.place.model_folder / SLOWER_GROUPS).exists():
        factor = json.loads(slower.read_text()).get(config.group_name, 1.0)
        hardware = hardware.slower(factor)
        profile = hardware.profile(f"paced, {factor:g} times as slow")
    if isinstance(config.section, PrefillConfig):
        engine = PacedPrefillEngine(decoder, hardware, config.section)
        server: Server = await PrefillServer.start(engine, config.place, profile=profile)
    else:
        assert isinstance(config.section, EngineConfig)
        server = await start_group(config.place, config.section, hardware, decoder)
    collect_rarely()
    return server


async def start_group(
    place: WorkerPlace, section: EngineConfig, hardware: PacedHardware, model: Decoder
) -> GenerationServer:
    assert section.speculation == "off", "drafts are not paced"
    clock, steps = SystemClock(), PacedSteps(hardware)
    decoder = PacedStepDecoder(model, steps)
    section = replace(section, max_slot_tokens=min(section.max_slot_tokens, decoder.config.max_position))
    terms = SeenTerms(ClusterSecret(place.secret))
    server = make_server(check=terms.check)
    port = bind(server, place.host)
    slots = SlotTable(make_memory(decoder, section, place.num_engines), clock, endpoint=f"{place.host}:{port}")
    tokenizer = await asyncio.to_thread(Tokenizer.load, place.model_folder)
    served = ServedModel(decoder, tokenizer)
    scheduling_policy = PacedPolicy(ChunkedPrefillPolicy.of(section, served), steps)
    engine = GenerationEngine(served, RunningRows(slots, scheduling_policy), section)
    servicer = GenerationServicer(engine, decoder.layout, terms)
    generate_pb2_grpc.add_GenerationGroupServicer_to_server(servicer, server)
    KvReceiverServicer(slots, None, clock=clock).add_to(server)
    await server.start()
    engine.start()
    return GenerationServer(server, servicer, slots, port)


if __name__ == "__main__":
    sys.exit(worker_process.main(start_paced))
