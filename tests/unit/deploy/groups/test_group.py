"""A group's supervisor: what ended is replaced, chains get new links, and what cannot be is said."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from baton import __version__
from baton.errors import ModelError, UnavailableError, VersionMismatchError
from baton.planning.device_profile import DeviceProfile, nominal_core, nominal_gpu
from baton.process.backoff import Backoff
from baton.process.clock import SystemClock
from baton.transport.proto_types import kernels_to_proto
from baton.types import KernelChoice
from baton.v1.prefill_pb2 import PrefillStatus
from deploy.groups.chain_links import ChainLinks
from deploy.groups.cluster import Cluster
from deploy.groups.compatibility import CompatibilityCheck
from deploy.groups.group import WorkerGroup
from deploy.groups.surroundings import Heartbeat, Surroundings
from tests.support.clusters.clients import HOST
from tests.support.clusters.workers import InProcessSpawner, tiny_worker
from tests.support.eventually import eventually
from tests.support.models.tiny_models import random_decoder

pytestmark = pytest.mark.integration


class Bench:
    """A chain of two ranks and an engine over one spawner."""

    def __init__(self) -> None:
        self.spawner = InProcessSpawner()
        self.num_changes = 0
        self.reports: list[str] = []
        self.around = Surroundings(
            self.spawner,
            Heartbeat(0.05, 20.0),
            SystemClock(),
            self.reports.append,
            self._count,
            backoff=Backoff(first_s=0.2, most_s=0.4),
        )
        self.links = ChainLinks(HOST, 60.0)
        ranks = [tiny_worker("prefill", rank) for rank in range(2)]
        self.chain = WorkerGroup("prefill-0", ranks, self.around, self.links)
        self.engine = WorkerGroup("generate-0", [tiny_worker("generate")], self.around)
        self.cluster = Cluster([self.chain], [self.engine], self.around)

    async def chain_profile(self) -> DeviceProfile | None:
        return self.chain.profile

    def _count(self) -> None:
        self.num_changes += 1


@pytest.fixture
def bench() -> Bench:
    return Bench()


@asynccontextmanager
async def running(bench: Bench) -> AsyncIterator[Bench]:
    await bench.cluster.start()
    try:
        yield bench
    finally:
        await bench.cluster.close()
    assert all(worker.ended for worker in bench.spawner.made)


async def test_a_started_cluster_is_ready_and_seen(bench: Bench) -> None:
    async with running(bench):
        view = bench.cluster.view(num_slots=2, max_slot_tokens=64)
    assert [(group.name, group.ready, group.epoch, len(group.endpoints)) for group in view.prefill] == [
        ("prefill-0", True, 1, 2)
    ]
    assert [(group.name, group.ready) for group in view.generation] == [("generate-0", True)]
    assert view.generation[0].layout_fingerprint == random_decoder().layout.fingerprint
    assert (view.generation[0].residency, view.generation[0].is_approximate) == ("device", False)


async def test_groups_are_seen_with_the_profile_of_their_slowest_worker(bench: Bench) -> None:
    slow, fast, gpu = nominal_core(4), nominal_core(2), nominal_gpu("NVIDIA L4", 2)
    bench.spawner.profiles = {"prefill-0.0": fast, "prefill-0.1": slow, "generate-0": gpu}
    async with running(bench):
        view = bench.cluster.view(num_slots=2, max_slot_tokens=64)
        assert [group.profile for group in view.groups] == [slow, gpu]
        bench.spawner.profiles["prefill-0.1"] = gpu
        bench.chain.workers[1].handle.kill()
        await eventually(bench.chain_profile, fast.__eq__, within_s=60)


async def test_a_worker_that_reports_no_profile_is_seen_without_one(bench: Bench) -> None:
    async with running(bench):
        view = bench.cluster.view(num_slots=2, max_slot_tokens=64)
    assert [group.profile for group in view.groups] == [None, None]


async def test_a_chain_is_seen_with_the_prefix_store_of_its_node(bench: Bench, tmp_path: Path) -> None:
    async with running(bench):
        assert bench.cluster.view(num_slots=2, max_slot_tokens=64).prefill[0].prefix_store == ""
    keeping = Bench()
    keeping.spawner.folders["prefill"] = tmp_path / "prefixes"
    async with running(keeping):
        (group,) = keeping.cluster.view(num_slots=2, max_slot_tokens=64).prefill
        stat = (tmp_path / "prefixes").stat()
        assert group.prefix_store.endswith(f":{stat.st_dev}:{stat.st_ino}")


async def test_an_ended_rank_is_replaced_and_the_chain_linked_anew(bench: Bench) -> None:
    async with running(bench):
        survivor, victim = bench.chain.endpoints
        bench.chain.workers[1].handle.kill()
        await bench.chain.workers[1].handle.wait()
        bench.chain.suspect()
        await bench.cluster.until_ready(60)
        assert bench.chain.endpoints[0] == survivor
        assert bench.chain.endpoints[1] != victim
        assert bench.links.epoch >= 2
        assert bench.engine.ready


async def test_an_ended_engine_is_replaced_and_the_chain_left_alone(bench: Bench) -> None:
    async with running(bench):
        before = bench.engine.endpoints
        changes = bench.num_changes
        bench.engine.workers[0].handle.kill()
        await bench.engine.workers[0].handle.wait()
        bench.engine.suspect()
        await bench.cluster.until_ready(60)
        assert bench.engine.endpoints != before
        assert bench.links.epoch == 1
        assert bench.num_changes >= changes + 2


async def test_a_replacement_that_fails_is_tried_again(bench: Bench) -> None:
    async with running(bench):
        bench.spawner.failures = [UnavailableError("not now"), UnavailableError("not yet")]
        bench.engine.suspect()
        bench.engine.workers[0].handle.kill()
        await bench.engine.workers[0].handle.wait()
        bench.engine.suspect()
        await bench.cluster.until_ready(60)
        assert not bench.spawner.failures
        assert len(bench.spawner.made) == 4
    assert bench.reports[-4:-1] == [
        "generate-0 ended with a word: replacing it",
        "generate-0 could not be replaced (not now), 2 times in a row: next try in 0.2 s",
        "generate-0 could not be replaced (not yet), 3 times in a row: next try in 0.4 s",
    ]


async def test_a_worker_that_ends_again_and_again_is_waited_for_and_its_neighbours_stay(bench: Bench) -> None:
    async with running(bench):
        survivor = bench.chain.endpoints[0]
        for _ in range(3):
            await bench.chain.workers[1].handle.close()
            bench.chain.suspect()
            await bench.cluster.until_ready(60)
        assert bench.chain.endpoints[0] == survivor
    ends = [line for line in bench.reports if "ended" in line]
    assert ends == [
        "prefill-0.1 ended with a word: replacing it",
        "prefill-0.1 ended with a word, 2 times in a row: next try in 0.2 s",
        "prefill-0.1 ended with a word, 3 times in a row: next try in 0.4 s",
    ]
    assert not [line for line in bench.reports if "prefill-0.0 ended" in line]


async def test_a_chain_whose_ranks_are_late_to_answer_waits_for_links_to_the_rank_that_came(bench: Bench) -> None:
    async with running(bench):
        joining = bench.chain.configs[1]
        worker = await bench.chain.give(1)
        await bench.chain.until_ready()
        alone, punctual = bench.links.epoch, bench.around.heartbeat
        bench.chain._around = replace(bench.around, heartbeat=replace(punctual, interval_s=-1.0))  # all are late
        await bench.chain.receive(joining, worker)
        assert len(bench.chain.endpoints) == 2
        assert not bench.chain.ready or bench.links.epoch > alone
        bench.chain._around = bench.around
        await bench.chain.until_ready()
        assert bench.links.epoch > alone


async def test_a_failed_start_leaves_nothing(bench: Bench) -> None:
    bench.spawner.failures = [ModelError("no such model")]
    with pytest.raises(ModelError, match="no such model"):
        await bench.cluster.start()
    assert len(bench.spawner.made) == 2
    assert all(worker.ended for worker in bench.spawner.made)


async def test_workers_of_two_models_are_refused(bench: Bench) -> None:
    bench.spawner.decoders["prefill-0.1"] = random_decoder(num_kv_heads=4)
    with pytest.raises(VersionMismatchError, match="workers differ in KV layout: .* run one model"):
        await bench.cluster.start()
    assert all(worker.ended for worker in bench.spawner.made)


@pytest.mark.parametrize("version", ["0.1.0", ""])
def test_a_worker_of_another_version_is_refused(version: str) -> None:
    with pytest.raises(VersionMismatchError, match=f"^prefill-0.0 has Baton {version}, its supervisor {__version__}"):
        CompatibilityCheck().check(tiny_worker("prefill", 0), PrefillStatus(version=version))


def test_workers_on_one_kind_of_processor_have_the_same_kernels() -> None:
    compatibility = CompatibilityCheck()
    ours = KernelChoice("Zen [12]", "dot", "widened", 64)
    others = KernelChoice("Xeon [34]", "tiles", "tiles", None)
    for rank, choice in enumerate((ours, others, ours)):
        status = PrefillStatus(version=__version__, kernels=kernels_to_proto(choice))
        compatibility.check(tiny_worker("prefill", rank), status)
    differing = PrefillStatus(version=__version__, kernels=kernels_to_proto(replace(ours, torch_rows=None)))
    with pytest.raises(
        VersionMismatchError, match=r"on Zen \[12\] differ in kernels: prefill-0.0 has .* prefill-0.3 has"
    ):
        compatibility.check(tiny_worker("prefill", 3), differing)


async def test_a_new_supervisor_counts_on_from_the_epoch_that_it_finds(bench: Bench) -> None:
    bench.links.skip_to(41)
    async with running(bench):
        assert bench.links.epoch == 42


async def test_waiting_for_readiness_is_bounded(bench: Bench) -> None:
    with pytest.raises(UnavailableError, match="have not been ready for 0.01 s"):
        await asyncio.wait_for(bench.cluster.until_ready(0.01), 60)
