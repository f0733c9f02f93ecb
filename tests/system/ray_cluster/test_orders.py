"""A cluster on Ray whose groups end, start, reload and lend workers while streams run. No stream is lost, and no token
is missing or repeated, even if a supervisor or an orchestrator is killed meanwhile.

In-process tests in `tests/unit/deploy/groups` check the meaning of orders. These tests check that Ray's actors and
placement groups carry them out, and that Ray's key-value store keeps them.
"""

import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import cycle, islice

import pytest
from safetensors.torch import load_file, save_file

from baton import Client
from baton.calls.cluster_state import GroupState
from baton.errors import BatonError
from deploy.commands.admin_channel import admin_channel
from deploy.commands.cluster_secrets import token_path
from deploy.commands.group_admin import GroupAdmin
from deploy.commands.record import process_start
from tests.support.clusters.on_ray.ray_clusters import (
    ANSWER,
    ServedCluster,
    Streams,
    check_answer,
    listener,
    secret_of,
    supervisor,
    supervisors,
    until,
    until_settled,
)
from tests.support.clusters.on_ray.ray_heads import held_of
from tests.support.engines.generation import prompt

pytestmark = [pytest.mark.cluster, pytest.mark.ci]

MODEL = "model.safetensors"
NAMES = ["prefill-0", "generate-0", "generate-1"]


def _names(client: Client) -> list[str]:
    return [group.name for group in client.cluster_state().groups]


def _processes(client: Client) -> dict[str, list[int]]:
    """Of the workers of each group."""
    groups = client.cluster_state().groups
    return {group.name: [listener(endpoint) for endpoint in group.endpoints] for group in groups}


def _places(one_host: ServedCluster) -> list[str]:
    """Groups that have room on Ray."""
    return sorted(held_of(one_host.ray_address, token_path(one_host.record))["places"])


def _do(one_host: ServedCluster, *arguments: str) -> str:
    """A command that succeeds: what it prints."""
    done = one_host.command(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def _lose_orchestrator_and_supervisor(one_host: ServedCluster, client: Client) -> None:
    """Both are killed, and there are others."""
    victims = (listener(one_host.target), supervisor(one_host.ray_folder))
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    until(lambda: bool(supervisors(one_host.ray_folder) - set(victims)))
    until_settled(one_host, client)


def test_a_group_leaves_under_streams_stays_away_over_restarts_and_comes_back(
    one_host: ServedCluster, client: Client
) -> None:
    (process,) = _processes(client)["generate-1"]
    with Streams(one_host, client) as streams:
        until(lambda: all(group.num_requests for group in client.cluster_state().groups if group.role == "generate"))
        left = _do(one_host, "drain", "generate-1")
        assert left == "generate-1 has left: `baton drain generate-1 --undo` brings it back\n"
        until(lambda: not process_start(process))
        streams.check()
    assert _places(one_host) == ["generate-0", "prefill-0"]
    _lose_orchestrator_and_supervisor(one_host, client)
    assert _names(client) == ["prefill-0", "generate-0"]
    told = "degraded: generate-1 has left: `baton drain generate-1 --undo` starts it"
    assert told in one_host.command("status").stdout
    assert _do(one_host, "drain", "generate-1", "--undo") == "generate-1 may get work again\n"
    assert _names(client) == NAMES


def test_groups_load_anew_under_streams(one_host: ServedCluster, client: Client) -> None:
    before = _processes(client)
    with Streams(one_host, client) as streams:
        for name in ("prefill-0", "generate-1"):
            assert _do(one_host, "reload", "--group", name) == f"{name} has new workers: 1 of 1 groups\n"
        streams.check()
    after = _processes(client)
    assert after["generate-0"] == before["generate-0"]
    for name in ("prefill-0", "generate-1"):
        assert not set(before[name]) & set(after[name])
        assert not any(process_start(process) for process in before[name])
    assert _names(client) == NAMES


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("num_times", [1, pytest.param(100, marks=pytest.mark.nightly)])
def test_a_pool_gets_smaller_and_larger_again_and_again_under_streams(
    one_host: ServedCluster, client: Client, num_times: int
) -> None:
    with Streams(one_host, client) as streams:
        for _ in range(num_times):
            for number in (1, 2):
                _do(one_host, "scale", "generate", str(number))
                assert len([name for name in _names(client) if name.startswith("generate")]) == number
        streams.check()


@pytest.mark.nightly
def test_a_cluster_whose_groups_have_all_left_outlives_its_supervisor(one_host: ServedCluster, client: Client) -> None:
    for name in NAMES:
        _do(one_host, "drain", name)
    victim = supervisor(one_host.ray_folder)
    os.kill(victim, signal.SIGKILL)
    until(lambda: bool(supervisors(one_host.ray_folder) - {victim}))
    for name in NAMES:
        _do(one_host, "drain", name, "--undo")
    assert _names(client) == NAMES


@pytest.mark.nightly
def test_other_weights_are_taken_by_all_groups_and_found_again(one_host: ServedCluster, client: Client) -> None:
    other = one_host.cache / "baton" / "other"  # orchestrator.model_folders has this cache
    shutil.copytree(one_host.model, other)
    weights = load_file(one_host.model / MODEL)
    save_file({name: tensor * (1.5 if "q_proj" in name else 1) for name, tensor in weights.items()}, other / MODEL)
    for name in NAMES:
        _do(one_host, "reload", "--group", name, "--model", str(other))
    token_ids = prompt(80)
    answer = client.generate(token_ids=token_ids, params=ANSWER).collect()
    check_answer(replace(one_host, model=other), token_ids, answer, ANSWER)
    processes = _processes(client)
    _lose_orchestrator_and_supervisor(one_host, client)
    assert _processes(client) == processes
    for name in NAMES:
        _do(one_host, "reload", "--group", name, "--model", str(one_host.model))


# Roles


def _group(client: Client, name: str) -> GroupState | None:
    return next((group for group in client.cluster_state().groups if group.name == name), None)


def _change(one_host: ServedCluster, group: str) -> str:
    """A worker of the group changes its role; the group that serves with it then."""
    with admin_channel(one_host.target, secret_of(one_host.cache), None) as channel:
        state = GroupAdmin(channel, 180).flip(group, undo=False)
    assert state is not None
    return state.name


def _borrower(client: Client) -> str:
    """The group that has borrowed a worker; none while there is no orchestrator."""
    try:
        groups = client.cluster_state().groups
    except BatonError:
        return ""
    return next((group.name for group in groups if group.lender), "")


def test_what_is_lent_stays_lent_over_restarts_and_goes_back(one_host: ServedCluster, client: Client) -> None:
    before = _processes(client)
    with Streams(one_host, client) as streams:
        lent = _do(one_host, "flip", "prefill-0")
        streams.check()
    borrower = _borrower(client)
    assert lent.startswith(f"{borrower} serves with a worker of prefill-0")
    assert f"{borrower} (lent by prefill-0)" in one_host.command("status").stdout
    _lose_orchestrator_and_supervisor(one_host, client)
    ranks = before["prefill-0"]
    assert _processes(client) == {**before, "prefill-0": ranks[:1], borrower: ranks[1:]}
    assert _places(one_host) == sorted(NAMES)
    assert _do(one_host, "flip", "prefill-0", "--undo") == "prefill-0 has its worker again\n"
    assert _processes(client) == before


@pytest.mark.parametrize(
    "returns", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["lending", "returning"]
)
def test_a_supervisor_that_dies_between_order_and_completion_is_followed_by_one_that_completes_it(
    one_host: ServedCluster, client: Client, returns: bool
) -> None:
    before = _processes(client)
    borrower = _change(one_host, "prefill-0") if returns else ""
    with Streams(one_host, client) as streams, ThreadPoolExecutor(1) as pool:
        changing = pool.submit(_change, one_host, borrower or "prefill-0")
        until(lambda: _group(client, borrower) is None if returns else _has_one_rank(client))
        os.kill(supervisor(one_host.ray_folder), signal.SIGKILL)
        outcome = changing.result()
        streams.check()
    if not returns:
        assert outcome == _borrower(client)
        outcome = _change(one_host, outcome)
    assert outcome == "prefill-0"
    assert _processes(client) == before


def _has_one_rank(client: Client) -> bool:
    chain = _group(client, "prefill-0")
    return chain is None or len(chain.endpoints) == 1


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_roles_change_under_streams_and_processes_stay(one_host: ServedCluster, client: Client) -> None:
    before = _processes(client)
    with Streams(one_host, client) as streams:
        for lender in islice(cycle(("prefill-0", "generate-1", "generate-0")), 50):
            borrower = _change(one_host, lender)
            assert _processes(client)[borrower] == before[lender][-1:]
            assert _change(one_host, borrower) == lender
        streams.check()
    assert _processes(client) == before
    assert _places(one_host) == sorted(NAMES)
