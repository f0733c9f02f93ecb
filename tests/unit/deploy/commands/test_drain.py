"""`baton drain` and `baton status` as a user types them, against a real orchestrator and its workers."""

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from baton import __version__
from baton.calls.cluster_state import GenerationStatus, GroupState
from baton.sampling_params import SamplingParams
from deploy.commands.cluster_secrets import keep_secrets
from deploy.commands.group_admin import left_of
from deploy.commands.record import ClusterRecord, process_start, record_path
from tests.support.clusters.clients import HOST
from tests.support.clusters.cluster import BareCluster, cluster
from tests.support.clusters.on_ray.ray_clusters import share_measurements
from tests.support.engines.generation import prompt
from tests.support.eventually import eventually
from tests.support.wire.commands import Baton, Run
from tests.support.wire.secret import SECRET

pytestmark = pytest.mark.integration

LONG = SamplingParams(max_tokens=150, seed=4, ignore_eos=True)
GROUP = GroupState("g", "generate", ("h:1",), 0, True, 0, 0)


@dataclass(frozen=True)
class Shell:
    """Runs commands on the machine that `cluster` was brought up on."""

    cluster: BareCluster
    baton: Baton

    @property
    def target(self) -> str:
        return f"{HOST}:{self.cluster.server.port}"

    async def run(self, *arguments: str) -> Run:
        return await self.baton.run_beside(arguments)


UNREACHABLE = f"no orchestrator answers at {HOST}:1 within 5 s: name one that is served, or check --target"


@pytest.fixture
async def shell(cache: Path, known: None, baton: Baton) -> AsyncIterator[Shell]:
    """Of a cluster named mine, with two generation groups behind one rank."""
    share_measurements(cache)
    async with cluster(num_ranks=1, num_groups=2, num_slots=2) as running:
        made = Shell(running, baton)
        pid = os.getpid()
        ClusterRecord("mine", pid, process_start(pid), f"{HOST}:1", "", made.target).save()
        keep_secrets(record_path("mine"), SECRET)
        yield made


async def test_a_group_is_drained_and_has_work_again(shell: Shell) -> None:
    drained = Run(0, "group-0 is drained: it has nothing left to do\n", "")
    assert await shell.run("drain", "group-0", "mine", "--keep") == drained
    assert shell.cluster.members.orders.drained == {"group-0"}
    assert await shell.run("drain", "group-0", "--undo", "--target", shell.target) == Run(
        0, "group-0 may get work again\n", ""
    )
    assert not shell.cluster.members.orders.drained


async def test_a_drain_waits_for_what_runs_or_says_what_is_left(shell: Shell) -> None:
    call, answer, busy = await shell.cluster.held_up(shell.cluster.request(prompt(20), LONG))
    late = await shell.run("drain", busy, "mine", "--timeout", "3")
    assert (late.status, late.out) == (1, "")
    assert late.err == (
        f"baton: {busy} is not done after 3 s, with 1 request, 1 of 2 slots: it stays drained; wait on, or --undo\n"
    )
    shown = await shell.run("status", "mine")
    assert f"{busy}  draining" in shown.out and f"degraded: {busy} is drained" in shown.out
    waiting = asyncio.create_task(shell.run("drain", busy, "mine", "--keep"))
    shell.cluster.group_gates[int(busy[-1])].open()
    await answer.drain(call)
    assert (await waiting).out == f"{busy} is drained: it has nothing left to do\n"
    assert len(answer.token_ids) == LONG.max_tokens


async def test_a_group_that_gets_work_again_meanwhile_is_not_drained(shell: Shell) -> None:
    call, _, busy = await shell.cluster.held_up(shell.cluster.request(prompt(20), LONG))
    waiting = asyncio.create_task(shell.run("drain", busy, "mine", "--keep"))
    await eventually(lambda: drained(shell), lambda names: busy in names)
    shell.cluster.members.undrain(busy)
    undone = await waiting
    assert (undone.status, undone.err) == (1, f"baton: {busy} was let have work again meanwhile: it is not drained\n")
    call.cancel()


async def drained(shell: Shell) -> frozenset[str]:
    return shell.cluster.members.orders.drained


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (("group-0", "mine"), 1, "group-0 cannot leave, as no supervisor ends its workers: drain it with --keep"),
        (("group-9", "mine"), 1, "there is no group group-9: name one of chain, group-0, group-1"),
        (("group-9", "mine", "--undo"), 1, "there is no group group-9: name one of chain, group-0, group-1"),
        (("group-0", "yours"), 2, "cluster yours is not running here: start it with `baton serve`, or give --target"),
        (("group-0", "--target", f"{HOST}:1"), 1, UNREACHABLE),
        (("group-0", "mine", "--timeout", "0"), 2, "--timeout 0 is out of range: use a time above 0 seconds"),
    ],
)
async def test_mistakes_are_said_in_one_line(shell: Shell, arguments: tuple[str, ...], status: int, text: str) -> None:
    assert await shell.run("drain", *arguments) == Run(status, "", f"baton: {text}\n")


async def test_status_shows_processors_slots_memory_and_metrics(shell: Shell) -> None:
    shown = await shell.run("status", "mine")
    assert (shown.status, shown.err) == (0, "")
    first, processors, metrics, *tables = shown.out.splitlines()
    assert first == f"cluster mine on {shell.target}: 0 running, 0 queued with 0 prompt tokens"
    assert processors.startswith("chain, group-0, group-1 on ")
    assert metrics == f"metrics on http://{HOST}:{shell.cluster.server.metrics_port}/metrics"
    slots = next(line.split() for line in tables if line.split()[:2] == ["group-1", "slots"])
    assert slots == ["group-1", "slots", "2", "2", "0", "0", "0"]


async def test_status_says_why_a_cluster_does_not_serve(shell: Shell) -> None:
    for name in ("group-0", "group-1"):
        shell.cluster.members.drain(name)
    shown = await shell.run("status", "mine")
    assert shown.status == 1
    assert "not serving: no generation group is ready" in shown.out.splitlines()


async def test_the_status_of_another_version_s_cluster_is_one_line(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.observability.state.__version__", "0.1.0")
    shown = await shell.run("status", "mine")
    sides = f"the orchestrator has Baton 0.1.0, and this side has {__version__}"
    assert (shown.status, shown.out) == (1, f"cluster mine: {sides}: run one version on both sides\n")


@pytest.mark.parametrize(
    ("group", "word"),
    [
        (GROUP, "yes"),
        (replace(GROUP, is_ready=False), "no"),
        (replace(GROUP, is_ready=False, is_broken=True), "broken"),
        (replace(GROUP, is_ready=False, is_drained=True, num_requests=1), "draining"),
        (replace(GROUP, is_ready=False, is_drained=True), "drained"),
    ],
)
def test_one_word_says_whether_a_group_gets_work(group: GroupState, word: str) -> None:
    assert group.readiness == word


def test_what_is_left_is_counted() -> None:
    busy = GenerationStatus(num_slots=4, num_free=1)
    assert left_of(replace(GROUP, num_requests=2, generation=busy)) == "2 requests, 3 of 4 slots"
    assert left_of(replace(GROUP, role="prefill", num_requests=1)) == "1 request"
