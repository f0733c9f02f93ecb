"""A store is asked once what it holds, when it comes into view; what it does not say is no harm."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.modeling.hosting import PrefixPlace
from baton.modeling.kv.buffers import KvBuffer
from baton.process.clock import SystemClock
from baton.types import Epoch, TokenRange
from orchestrator.membership.members import Membership
from orchestrator.membership.view import ClusterView, PrefillGroup
from orchestrator.placement.prefix_index import PrefixIndex
from orchestrator.workers.client import Clients
from orchestrator.workers.prefix_discovery import PrefixStores
from prefill_workers.config import PrefillConfig
from prefill_workers.engine import PrefillEngine
from prefill_workers.servicer import PrefillServer
from tests.support.clusters.cluster import cluster
from tests.support.engines.prefixes import PLENTY, keep
from tests.support.eventually import eventually
from tests.support.models.tiny_models import random_decoder
from tests.support.wire.secret import PLACE, SECRET

pytestmark = pytest.mark.integration

HOST = "127.0.0.1"
NAMES = ("a", "b", "c")


class Bench:
    """A rank, and who asks it."""

    def __init__(self, rank: PrefillServer) -> None:
        self.rank = rank
        self.members, self.index, self.clients = Membership(), PrefixIndex(), Clients(SECRET)
        self.stores = PrefixStores(self.members, self.clients, self.index)

    def keep(self, names: tuple[str, ...]) -> None:
        assert self.rank.prefixes is not None
        keep(self.rank.prefixes, KvBuffer(random_decoder().layout, TokenRange(0, 4 * len(names))), names)

    def see(self, *stores: str, port: int = 0) -> None:
        """Groups of the rank, with these stores."""
        endpoint = f"{HOST}:{port or self.rank.port}"
        groups = [PrefillGroup(f"p-{store}", (endpoint,), Epoch(1), True, store) for store in stores]
        self.members.update(ClusterView(prefill=tuple(groups)))
        self.stores.look()

    async def until_known(self, num_blocks: int) -> None:
        async def known() -> int:
            return len(self.index)

        await eventually(known, lambda number: number == num_blocks)


@asynccontextmanager
async def running(folder: Path | None) -> AsyncIterator[Bench]:
    engine = PrefillEngine(random_decoder(), SystemClock(), PrefillConfig())
    prefixes = None if folder is None else PrefixPlace(folder, PLENTY)
    rank = await PrefillServer.start(engine, PLACE, prefixes=prefixes)
    bench = Bench(rank)
    try:
        yield bench
    finally:
        await bench.stores.close()
        await bench.clients.prune(())
        await rank.stop()


async def test_what_an_earlier_orchestrator_s_prompts_left_is_known(folder: Path) -> None:
    async with running(folder) as bench:
        bench.keep(NAMES)
        bench.see("s")
        await bench.until_known(3)
        assert bench.index.num_held("s", NAMES) == 3


async def test_a_store_is_asked_once_and_forgotten_when_it_is_gone(folder: Path) -> None:
    async with running(folder) as bench:
        bench.keep(NAMES[:1])
        bench.see("s")
        await bench.until_known(1)
        bench.keep(NAMES)
        bench.see("s", "t")
        await bench.until_known(1 + 3)
        assert bench.index.num_held("s", NAMES) == 1
        bench.see("t")
        assert (bench.index.num_held("s", NAMES), len(bench.index)) == (0, 3)


async def test_a_generation_group_is_asked_where_no_rank_shares_its_store(folder: Path) -> None:
    async with cluster(num_ranks=0, folders={"generate": folder}) as made:
        store = made.groups[0].prefixes
        assert store is not None
        keep(store, KvBuffer(random_decoder().layout, TokenRange(0, 12)), NAMES)
        index, clients = PrefixIndex(), Clients(SECRET)
        stores = PrefixStores(made.members, clients, index)
        stores.look()
        await eventually(lambda: asyncio.sleep(0, len(index)), lambda number: number == 3)
        assert index.num_held(store.identity, NAMES) == 3
        await stores.close()
        await clients.prune(())


async def test_who_has_no_store_or_does_not_answer_has_nothing_cached() -> None:
    async with running(None) as bench:
        bench.see("s")
        bench.see("s", "t", port=1)
        bench.see("")
        assert len(bench.index) == 0
