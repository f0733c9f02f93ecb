"""Servers of workers in a process: one without its cluster's secret does not start, for it would serve every caller, or
none; and one after another leaves nothing behind but the model."""

import gc
import operator
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from baton.errors import ConfigError, ModelError
from baton.modeling.forward.decoder import Decoder
from baton.modeling.hosting import LoadedModel
from deploy.config.worker import WorkerConfig
from deploy.groups.hosting import Server, WorkerHost, start_server
from generate_workers.servicer import GenerationServer
from prefill_workers.servicer import PrefillServer
from tests.support.clusters.workers import NONE, orchestrator_worker, tiny_worker
from tests.support.eventually import eventually

pytestmark = pytest.mark.integration

WORKERS = [tiny_worker("prefill"), tiny_worker("generate"), orchestrator_worker(NONE)]


@pytest.mark.parametrize("config", WORKERS, ids=lambda config: config.role)
async def test_a_worker_without_its_clusters_secret_is_refused_before_it_loads_anything(config: WorkerConfig) -> None:
    with pytest.raises(ConfigError, match="the cluster's secret is nothing: give the 64 hexadecimal digits"):
        await start_server(replace(config, place=replace(config.place, secret="")))


@pytest.fixture
def own_process() -> Iterator[None]:
    """As it was, for later tests: what a worker sets for its whole process."""
    threshold, num_threads = gc.get_threshold(), torch.get_num_threads()
    yield
    gc.unfreeze()
    gc.set_threshold(*threshold)
    torch.set_num_threads(num_threads)


class Servers:
    """Starts them, and remembers each while something else does."""

    def __init__(self) -> None:
        self.decoders: list[Decoder] = []
        self.former: list[weakref.ref[object]] = []

    async def start(self, config: WorkerConfig, model: LoadedModel | None) -> Server:
        server = await start_server(config, model)
        assert isinstance(server, PrefillServer | GenerationServer) and model is not None
        self.decoders.append(model.load(config.place))
        self.former += [weakref.ref(server), weakref.ref(server.engine)]
        if isinstance(server, GenerationServer):
            self.former.append(weakref.ref(server.slots))
        return server

    async def num_alive(self) -> int:
        """Servers, engines and tables of slots that are still in memory."""
        return sum(each() is not None for each in self.former)


@pytest.mark.usefixtures("own_process")
async def test_a_change_of_roles_keeps_the_model_and_frees_all_else(smollm2: Path) -> None:
    rank, engine = tiny_worker("prefill", folder=smollm2), tiny_worker("generate", folder=smollm2)
    servers = Servers()
    host = WorkerHost(servers.start)
    try:
        for config, num_own in ((rank, 2), (engine, 3), (rank, 2), (engine, 3)):
            assert await host.serve(config)
            await eventually(servers.num_alive, partial(operator.eq, num_own), within_s=60)
        assert len({id(decoder) for decoder in servers.decoders}) == 1
        with pytest.raises(ModelError, match="is not a model folder"):
            await host.serve(replace(rank, place=replace(rank.place, model_folder=Path("/absent"))))
        await eventually(servers.num_alive, lambda num_alive: not num_alive, within_s=60)
    finally:
        await host.stop()
