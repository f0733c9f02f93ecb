"""A cluster on Ray whose groups leave and come back, one by one, under running streams: none is lost, no token comes
twice and none is missing; what a group had is free; and whoever is killed meanwhile changes nothing of it."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from baton import Client
from deploy.commands.cluster_secrets import token_path
from deploy.commands.record import process_start
from modeling.checkpoints.weights import load_decoder
from tests.support.clusters.ray_clusters import (
    ANSWER,
    ServedCluster,
    Streams,
    listener,
    served,
    supervisor,
    supervisors,
    until,
    until_settled,
)
from tests.support.clusters.ray_heads import held_of
from tests.support.models.reference import check_equal_tokens
from tests.support.models.texts import passage_ids

pytestmark = pytest.mark.cluster

MODEL = "model.safetensors"
SETTINGS = (
    *("prefill.num_ranks=1", "generate.num_groups=2", "generate.num_slots=8"),
    *("supervision.heartbeat_s=0.5", "supervision.dead_after_s=15", "orchestrator.lease_ttl_s=15"),
)


@pytest.fixture(scope="module")
def cluster(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCluster]:
    with served(tmp_path_factory.mktemp("cache"), smollm2, *SETTINGS) as running:
        yield running


@pytest.fixture
def client(cluster: ServedCluster) -> Iterator[Client]:
    with Client(cluster.target) as made:
        yield made


def _names(client: Client) -> list[str]:
    return [group.name for group in client.cluster_state().groups]


def _processes(client: Client, *names: str) -> list[int]:
    groups = client.cluster_state().groups
    return [listener(endpoint) for group in groups if group.name in names for endpoint in group.endpoints]


def _until_sound(cluster: ServedCluster, client: Client) -> None:
    until_settled(cluster, client)
    assert client.cluster_state().why_not_serving == ()


@pytest.mark.ci
def test_a_group_leaves_under_streams_stays_away_over_restarts_and_comes_back(
    cluster: ServedCluster, client: Client, smollm2: Path
) -> None:
    (process,) = _processes(client, "generate-1")
    with Streams(client, smollm2) as streams:
        until(lambda: all(group.num_requests for group in client.cluster_state().groups if group.role == "generate"))
        left = cluster.command("drain", "generate-1")
        assert (left.returncode, left.stderr) == (0, "")
        assert left.stdout == "generate-1 has left: `baton drain generate-1 --undo` brings it back\n"
        until(lambda: not process_start(process))
        streams.check()
    record = cluster.cache / "baton" / "clusters" / "baton.json"
    address = json.loads(record.read_text())["ray_address"]
    assert sorted(held_of(address, token_path(record))["places"]) == ["generate-0", "prefill-0"]
    victims = (listener(cluster.target), supervisor(cluster.ray_folder))
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    until(lambda: bool(supervisors(cluster.ray_folder) - set(victims)))
    _until_sound(cluster, client)
    assert _names(client) == ["prefill-0", "generate-0"]
    assert (
        "degraded: generate-1 has left: `baton drain generate-1 --undo` starts it" in cluster.command("status").stdout
    )
    back = cluster.command("drain", "generate-1", "--undo")
    assert (back.returncode, back.stdout) == (0, "generate-1 may get work again\n")
    assert _names(client) == ["prefill-0", "generate-0", "generate-1"]


@pytest.mark.ci
def test_a_reload_under_streams_loses_nothing_though_the_supervisor_dies_in_the_middle(
    cluster: ServedCluster, client: Client, smollm2: Path
) -> None:
    names = ("prefill-0", "generate-1")
    before = _processes(client, *names)
    with Streams(client, smollm2) as streams, ThreadPoolExecutor(1) as pool:
        reloads = pool.submit(lambda: [cluster.command("reload", "--group", name) for name in names])
        until(lambda: "generate-1" not in _names(client) or reloads.done())
        os.kill(supervisor(cluster.ray_folder), signal.SIGKILL)
        for name, reloaded in zip(names, reloads.result(), strict=True):
            assert reloaded.returncode == 0, reloaded.stderr
            assert reloaded.stdout == f"{name} has new workers: 1 of 1 groups\n"
        streams.check()
    until(lambda: not any(process_start(process) for process in before))
    assert _names(client) == ["prefill-0", "generate-0", "generate-1"]
    _until_sound(cluster, client)


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    "num_times", [pytest.param(4, marks=pytest.mark.ci), pytest.param(100, marks=pytest.mark.nightly)]
)
def test_a_pool_gets_smaller_and_larger_again_and_again_under_streams(
    cluster: ServedCluster, client: Client, smollm2: Path, num_times: int
) -> None:
    with Streams(client, smollm2) as streams:
        for _ in range(num_times):
            for number in (1, 2):
                scaled = cluster.command("scale", "generate", str(number))
                assert scaled.returncode == 0, scaled.stderr
                assert len([name for name in _names(client) if name.startswith("generate")]) == number
        streams.check()
    _until_sound(cluster, client)


@pytest.mark.nightly
def test_the_last_group_that_generates_is_reloaded_behind_a_stand_in(
    cluster: ServedCluster, client: Client, smollm2: Path
) -> None:
    assert cluster.command("drain", "generate-1").returncode == 0
    (process,) = _processes(client, "generate-0")
    with Streams(client, smollm2) as streams:
        reloaded = cluster.command("reload", "--group", "generate-0")
        assert reloaded.returncode == 0, reloaded.stderr
        streams.check()
    until(lambda: not process_start(process))
    assert _names(client) == ["prefill-0", "generate-0"]
    assert "generate-2 has left" in cluster.stderr
    _until_sound(cluster, client)
    assert cluster.command("drain", "generate-1", "--undo").returncode == 0


@pytest.mark.nightly
def test_a_cluster_whose_groups_have_all_left_outlives_its_supervisor(cluster: ServedCluster, client: Client) -> None:
    names = _names(client)
    for name in names:
        assert cluster.command("drain", name).returncode == 0
    victim = supervisor(cluster.ray_folder)
    os.kill(victim, signal.SIGKILL)
    until(lambda: bool(supervisors(cluster.ray_folder) - {victim}))
    for name in names:
        assert cluster.command("drain", name, "--undo").returncode == 0
    assert _names(client) == names
    _until_sound(cluster, client)


@pytest.mark.nightly
def test_other_weights_are_taken_by_all_groups(cluster: ServedCluster, client: Client, smollm2: Path) -> None:
    other = cluster.cache / "baton" / "other"  # orchestrator.model_folders has this cache
    shutil.copytree(smollm2, other)
    weights = load_file(smollm2 / MODEL)
    save_file({name: tensor * (1.5 if "q_proj" in name else 1) for name, tensor in weights.items()}, other / MODEL)
    for name in _names(client):
        reloaded = cluster.command("reload", "--group", name, "--model", str(other))
        assert reloaded.returncode == 0, reloaded.stderr
    prompt = passage_ids(smollm2, 80)
    tokens = [token.token_id for token in client.generate(token_ids=prompt, params=ANSWER).collect().tokens]
    assert len(tokens) == ANSWER.max_tokens
    check_equal_tokens(load_decoder(other, dtype="float32"), prompt, tokens, ANSWER)
    processes, epoch = _processes(client, *_names(client)), client.cluster_state().groups[0].epoch
    os.kill(supervisor(cluster.ray_folder), signal.SIGKILL)  # the next one finds workers of that model
    until(lambda: client.cluster_state().groups[0].epoch > epoch)
    _until_sound(cluster, client)
    assert _processes(client, *_names(client)) == processes
