"""A cluster on Ray whose workers change their roles, back and forth, under running streams: none is lost, no token
comes twice and none is missing; processes stay; and whoever is killed meanwhile changes nothing of it."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path

import pytest

from baton import Client
from baton.cluster_state import GroupState
from baton.errors import BatonError
from baton.v1.admin_pb2_grpc import AdminStub
from deploy.commands.admin_channel import admin_channel
from deploy.commands.cluster_secrets import token_path
from deploy.commands.flip import flip
from deploy.commands.record import process_start
from tests.support.clusters.ray_clusters import (
    ServedCluster,
    Streams,
    listener,
    processes_of,
    secret_of,
    served,
    supervisor,
    supervisors,
    until,
    until_settled,
)
from tests.support.clusters.ray_heads import held_of

pytestmark = pytest.mark.cluster

NAMES = ["prefill-0", "generate-0", "generate-1"]
SETTINGS = (
    *("prefill.num_ranks=2", "generate.num_groups=2", "generate.num_slots=8"),
    *("supervision.heartbeat_s=0.5", "supervision.dead_after_s=15", "orchestrator.lease_ttl_s=15"),
)


@pytest.fixture(scope="module")
def cluster(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCluster]:
    with served(tmp_path_factory.mktemp("cache"), smollm2, *SETTINGS) as running:
        yield running
    assert not processes_of(running.ray_folder)  # the last test leaves workers lent


@pytest.fixture
def client(cluster: ServedCluster) -> Iterator[Client]:
    with Client(cluster.target) as made:
        yield made


def _processes(client: Client) -> dict[str, list[int]]:
    """Of the workers of each group."""
    groups = client.cluster_state().groups
    return {group.name: [listener(endpoint) for endpoint in group.endpoints] for group in groups}


def _group(client: Client, name: str) -> GroupState | None:
    return next((group for group in client.cluster_state().groups if group.name == name), None)


def _places(cluster: ServedCluster) -> list[str]:
    record = cluster.cache / "baton" / "clusters" / "baton.json"
    return sorted(held_of(json.loads(record.read_text())["ray_address"], token_path(record))["places"])


def _change(cluster: ServedCluster, group: str) -> str:
    """A worker of the group changes its role; the group that serves with it then."""
    with admin_channel(cluster.target, secret_of(cluster.cache), None) as channel:
        state = flip(AdminStub(channel), group, undo=False, timeout_s=180)
    assert state is not None
    return state.name


def _until_sound(cluster: ServedCluster, client: Client) -> None:
    until_settled(cluster, client)
    assert client.cluster_state().why_not_serving == ()


@pytest.mark.parametrize(
    "num_flips",
    [
        pytest.param(6, marks=pytest.mark.ci),
        pytest.param(100, marks=[pytest.mark.nightly, pytest.mark.timeout(2400)]),
    ],
)
def test_roles_change_under_streams_and_processes_stay(
    cluster: ServedCluster, client: Client, smollm2: Path, num_flips: int
) -> None:
    before = _processes(client)
    with Streams(client, smollm2) as streams:
        for lender in islice(cycle(("prefill-0", "generate-1", "generate-0")), num_flips // 2):
            borrower = _change(cluster, lender)
            assert _processes(client)[borrower] == before[lender][-1:]
            assert _change(cluster, borrower) == lender
        streams.check()
    assert _processes(client) == before
    until(lambda: client.cluster_state().why_degraded == ())
    assert _places(cluster) == sorted(NAMES)
    _until_sound(cluster, client)


@pytest.mark.ci
def test_what_is_lent_stays_lent_over_restarts_and_goes_back(
    cluster: ServedCluster, client: Client, smollm2: Path
) -> None:
    before = _processes(client)
    with Streams(client, smollm2) as streams:
        lent = cluster.command("flip", "prefill-0")
        assert (lent.returncode, lent.stderr) == (0, "")
        streams.check()
    borrower = _borrower(client)
    assert lent.stdout.startswith(f"{borrower} serves with a worker of prefill-0")
    assert f"{borrower} (lent by prefill-0)" in cluster.command("status").stdout
    victims = (listener(cluster.target), supervisor(cluster.ray_folder))
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    until(lambda: bool(supervisors(cluster.ray_folder) - set(victims)))
    _until_sound(cluster, client)
    ranks = before["prefill-0"]
    assert _processes(client) == {**before, "prefill-0": ranks[:1], borrower: ranks[1:]}
    back = cluster.command("flip", "prefill-0", "--undo")
    assert (back.returncode, back.stdout) == (0, "prefill-0 has its worker again\n")
    assert _processes(client) == before
    _until_sound(cluster, client)


@pytest.mark.ci
@pytest.mark.parametrize("returns", [False, True], ids=["lending", "returning"])
def test_a_supervisor_that_dies_between_order_and_completion_is_followed_by_one_that_completes_it(
    cluster: ServedCluster, client: Client, smollm2: Path, returns: bool
) -> None:
    before = _processes(client)
    borrower = _change(cluster, "prefill-0") if returns else ""
    with Streams(client, smollm2) as streams, ThreadPoolExecutor(1) as pool:
        changing = pool.submit(_change, cluster, borrower or "prefill-0")
        until(lambda: _group(client, borrower) is None if returns else _has_one_rank(client))
        os.kill(supervisor(cluster.ray_folder), signal.SIGKILL)
        outcome = changing.result()
        streams.check()
    if not returns:
        assert outcome == _borrower(client)
        outcome = _change(cluster, outcome)
    assert outcome == "prefill-0"
    assert _processes(client) == before
    _until_sound(cluster, client)


@pytest.mark.ci
def test_an_order_outlives_its_orchestrator(cluster: ServedCluster, client: Client, smollm2: Path) -> None:
    before = _processes(client)
    with Streams(client, smollm2) as streams, ThreadPoolExecutor(1) as pool:
        changing = pool.submit(cluster.command, "flip", "prefill-0")
        until(lambda: _has_one_rank(client))
        os.kill(listener(cluster.target), signal.SIGKILL)
        changing.result()
        until(lambda: bool(_borrower(client)))
        streams.check()
    assert _change(cluster, _borrower(client)) == "prefill-0"
    assert _processes(client) == before
    _until_sound(cluster, client)


def _has_one_rank(client: Client) -> bool:
    chain = _group(client, "prefill-0")
    return chain is None or len(chain.endpoints) == 1


def _borrower(client: Client) -> str:
    """The group that has borrowed a worker; none while there is no orchestrator."""
    try:
        groups = client.cluster_state().groups
    except BatonError:
        return ""
    return next((group.name for group in groups if group.lender), "")


@pytest.mark.ci
def test_a_borrowed_worker_that_is_killed_is_replaced_in_its_role_and_goes_back(
    cluster: ServedCluster, client: Client, smollm2: Path
) -> None:
    before = _processes(client)
    borrower = _change(cluster, "generate-1")
    endpoints = _endpoints(client, borrower)
    with Streams(client, smollm2) as streams:
        os.kill(before["generate-1"][0], signal.SIGKILL)
        until(lambda: _endpoints(client, borrower) not in ((), endpoints))
        assert _places(cluster) == sorted(NAMES)
        assert _change(cluster, borrower) == "generate-1"
        streams.check()
    after = _processes(client)
    assert {**after, "generate-1": before["generate-1"]} == before
    assert not process_start(before["generate-1"][0])
    _until_sound(cluster, client)
    for lender in ("prefill-0", "generate-0"):  # for the end of the cluster
        _change(cluster, lender)


def _endpoints(client: Client, name: str) -> tuple[str, ...]:
    """Of a group that is ready; none of others."""
    group = _group(client, name)
    return group.endpoints if group is not None and group.is_ready else ()
