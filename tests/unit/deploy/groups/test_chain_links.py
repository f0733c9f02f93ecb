"""The store at which ranks meet: reached over their interface alone, and gone when they have met."""

import asyncio
import os

import pytest

from deploy.groups.chain_links import ChainLinks, _make_store
from deploy.groups.worker import Worker
from tests.support.clusters.clients import HOST
from tests.support.clusters.listening import Listener, listeners
from tests.support.clusters.workers import InProcessSpawner, tiny_worker

pytestmark = pytest.mark.integration

NUM_RANKS = 2


def listening() -> set[Listener]:
    """What this process listens on."""
    return set(listeners({os.getpid()}))


def test_the_store_listens_on_the_given_interface_alone() -> None:
    before = listening()
    store = _make_store(HOST)
    (made,) = listening() - before
    assert (str(made.address), made.port) == (HOST, store.port)
    del store
    assert listening() == before


class Watched(ChainLinks):
    """Keeps the ports of the stores at which it lets ranks meet."""

    def __init__(self) -> None:
        super().__init__(HOST, timeout_s=60)
        self.ports: set[int] = set()

    async def _join(self, rank: int, num_ranks: int, worker: Worker, port: int) -> None:
        assert port in {each.port for each in listening()}
        self.ports.add(port)
        await super()._join(rank, num_ranks, worker, port)


async def test_once_the_ranks_have_met_their_store_is_gone() -> None:
    spawner = InProcessSpawner()
    workers = [Worker(await spawner.start(tiny_worker("prefill", rank))) for rank in range(NUM_RANKS)]
    links = Watched()
    try:
        for epoch in (1, 2):
            await links.renew(workers)
            assert links.epoch == epoch and links.ports
            assert not links.ports & {each.port for each in listening()}
    finally:
        await asyncio.gather(*(worker.close() for worker in workers))
