"""`baton top` of a real cluster: frames of its state, once and live."""

import asyncio
import os
import pty
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from baton.client import Client
from baton.process.clock import SystemClock
from baton.sampling_params import SamplingParams
from deploy.top.watch import Watch
from tests.support.clusters.clients import HOST
from tests.support.clusters.cluster import BareCluster, cluster
from tests.support.engines.generation import prompt
from tests.support.folders import ROOT
from tests.support.manual_clock import ManualClock
from tests.support.wire.commands import Baton
from tests.unit.deploy.top.test_frame import line_of, shown

pytestmark = pytest.mark.integration

PARAMS = SamplingParams(max_tokens=6, seed=4, ignore_eos=True)


@asynccontextmanager
async def watched() -> AsyncIterator[tuple[BareCluster, str]]:
    """Real ranks and engines with an orchestrator, and its address."""
    async with cluster() as made:
        yield made, f"{HOST}:{made.server.port}"


async def test_a_frame_has_the_groups_and_the_rates_of_what_was_served() -> None:
    async with watched() as (made, target):
        with Client(target) as client:
            clock = ManualClock()
            watch = Watch(client, target, clock)
            await asyncio.to_thread(watch.look)
            for _ in range(3):
                await made.ask(made.request(prompt(40), PARAMS))
            await made.until_empty()
            await made.server.orchestrator.poller.ask()  # a fast machine may have served within the last poll's 0.25 s
            clock.advance(1.0)
            lines = shown(await asyncio.to_thread(watch.look))
        assert watch.is_serving and lines[0].endswith("serving")
        assert "queue 0 requests, 0 tokens   running 0" in lines
        (rates,) = [line for line in lines if "requests/s" in line]
        numbers = [float(each) for each in re.findall(r"[\d.]+(?= (?:requests|output|prompt))", rates)]
        assert numbers == [3, 18, 120]
        assert re.search(r"first token p50 \d+ p95 \d+ ms   per token p50 \d+ p95 \d+ ms", "\n".join(lines))
        group = line_of(lines, "group-0")
        assert group[1:4] == ["yes", "0", f"0/{made.num_slots}"] and float(group[6]) > 0
        assert line_of(lines, "chain")[:4] == ["chain", "yes", "0", "1"] and "0: 0  1: 0" in "\n".join(lines)


async def test_work_that_is_running_is_shown() -> None:
    async with watched() as (made, target):
        made.group_gates[0].shut()
        call = made.open(made.request(prompt(40), replace(PARAMS, max_tokens=300)))
        await made.group_gates[0].until_reached()
        with Client(target) as client:
            lines = shown(await asyncio.to_thread(Watch(client, target, SystemClock()).look))
        assert line_of(lines, "group-0")[2:4] == ["1", f"1/{made.num_slots}"]
        assert any(line.endswith("running 1") for line in lines)
        call.cancel()
        made.group_gates[0].open()


async def test_one_frame_is_printed_for_scripts(baton: Baton) -> None:
    async with watched() as (_, target):
        run = await baton.run_beside(f"top --target {target} --once --interval 0.1")
    assert run.status == 0
    lines = run.out.splitlines()
    assert f"at {target}" in lines[0] and line_of(lines, "group-0")[1] == "yes"
    assert max(map(len, lines)) <= 80


async def test_frames_are_drawn_until_q_is_pressed() -> None:
    async with watched() as (_, target):
        seen = await asyncio.to_thread(watch_two_frames, target)
    assert b"serving" in seen and b"\x1b[?1049h" in seen


def watch_two_frames(target: str) -> bytes:
    """What `baton top` writes to a terminal on which q is pressed after two frames."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "deploy.cli", "top", "--target", target, "--interval", "0.1"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=environment, cwd=ROOT
    ) as running:
        os.close(theirs)
        seen = read_until(ours, rb"(?s)group-0.*group-0")
        os.write(ours, b"q")
        seen += read_until(ours, rb"\x1b\[\?1049l")  # the screen as it was before
        assert running.wait(60) == 0
        assert running.stderr is not None and running.stderr.read() == b""
    os.close(ours)
    return seen


def read_until(descriptor: int, pattern: bytes) -> bytes:
    """What comes until the pattern has."""
    seen = b""
    while not re.search(pattern, seen):
        part = os.read(descriptor, 65536)
        assert part, seen
        seen += part
    return seen


@pytest.mark.parametrize(
    ("arguments", "complaint", "status"),
    [
        ("--interval 0", "--interval = '0' is out of range", 2),
        ("no-such-cluster", "cluster no-such-cluster is not running here", 2),
        ("--target 127.0.0.1:9 --once", "127.0.0.1:9", 1),
    ],
)
def test_what_cannot_be_shown_is_one_line(baton: Baton, arguments: str, complaint: str, status: int) -> None:
    assert complaint in baton.refusal(f"top {arguments}", status)


def test_without_a_terminal_there_is_only_one_frame(baton: Baton, monkeypatch: pytest.MonkeyPatch) -> None:
    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        assert "standard input is not a terminal" in baton.refusal("top --target 127.0.0.1:9")
