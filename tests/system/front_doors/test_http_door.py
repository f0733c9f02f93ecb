"""The HTTP gateway that `baton serve` supervises: a real process in front of a scripted server, with its restarts and
its end."""

import asyncio
import math
import os
import shlex
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest

from baton.errors import ConfigError
from baton.proto_types import model_from_proto
from deploy.commands.http_door import HttpDoor, http_door
from deploy.config.cluster import ClusterConfig
from deploy.config.sections import HttpSection, OrchestratorSection
from tests.support.clusters.scripted_orchestrator import MODEL, Fault, ScriptedOrchestrator, serving, text_of
from tests.support.eventually import eventually
from tests.support.folders import ROOT
from tests.support.models.tiny_tokenizer import chat_letters
from tests.support.wire.collector import collector

pytestmark = pytest.mark.integration

DATA = ROOT / "tests" / "data"
CERTIFICATE, KEY = DATA / "localhost_certificate.pem", DATA / "localhost_key.pem"
BODY = {"prompt": "Hi", "max_tokens": 3}
REPLACED_S = 10.0
"""Limit in seconds for replacing a process that hangs on an idle machine: after 5 s without a heartbeat, and the
heartbeat's interval."""


class Lines(list[str]):
    """What the door has reported, and how long to wait for a line."""

    async def until(self, text: str, times: int = 1) -> str:
        async def found() -> list[str]:
            return [line for line in self if text in line]

        return (await eventually(found, lambda lines: len(lines) >= times, within_s=60))[-1]


class Unprintable(Lines):
    """Lines that the user's terminal does not take."""

    def append(self, line: str) -> None:
        super().append(line)
        raise OSError(28, "No space left on device")


@asynccontextmanager
async def opened(
    folder: Path, section: HttpSection, collected: str = "", *, lines: Lines | None = None, faults: Sequence[Fault] = ()
) -> AsyncIterator[tuple[HttpDoor, Lines, str]]:
    """A door that serves, what it reports, and the address of a server that it may be moved to. `collected` is the
    address of a collector of spans."""
    chat_letters(folder)
    lines = Lines() if lines is None else lines
    async with serving(ScriptedOrchestrator(faults)) as first, serving(ScriptedOrchestrator()) as second:
        config = ClusterConfig(http=section, orchestrator=OrchestratorSection(otlp_endpoint=collected))
        door = HttpDoor(config, folder, lines.append)
        try:
            door.serve(first, model_from_proto(MODEL))
            await lines.until("curl")
            yield door, lines, second
        finally:
            await asyncio.to_thread(door.close)


def processes(door: HttpDoor) -> list[int]:
    assert door._process is not None
    return [door._process.pid]


async def test_the_printed_command_gets_an_answer(tmp_path: Path) -> None:
    async with opened(tmp_path, HttpSection(port=0)) as (door, lines, _):
        command = [*shlex.split(await lines.until("curl")), "--silent", "--max-time", "30"]
        found = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
        assert "chat.completion" in found.stdout and door.url in command[1]


async def test_the_console_is_served_where_the_door_says_and_where_it_is_wanted(tmp_path: Path) -> None:
    async with opened(tmp_path, HttpSection(port=0)) as (_, lines, _other), httpx2.AsyncClient() as client:
        url = (await lines.until("web console")).removeprefix("web console: ")
        answer = await client.get(url, follow_redirects=True)
        assert answer.status_code == 200 and "<title>Baton console</title>" in answer.text
    async with opened(tmp_path, HttpSection(port=0, console=False)) as (door, lines, _), httpx2.AsyncClient() as client:
        assert (await client.get(f"{door.url}/console")).status_code == 404
        assert not [line for line in lines if "console" in line]


@pytest.mark.ci
async def test_it_is_started_again_at_the_same_address_and_those_who_come_meanwhile_wait(tmp_path: Path) -> None:
    async with (
        opened(tmp_path, HttpSection(port=0)) as (door, lines, other),
        httpx2.AsyncClient(base_url=door.url, timeout=60, headers={"connection": "close"}) as client,
    ):
        for incarnation in (1, 2):
            os.kill(processes(door)[0], signal.SIGKILL)
            await lines.until("ended (status -9)", times=incarnation)
            answer = await client.post("/v1/completions", json=BODY)
            assert answer.json()["choices"][0]["text"] == text_of(3)
            await lines.until("serves again", times=incarnation)
        door.serve(other, model_from_proto(MODEL))
        await lines.until("serves again", times=3)
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200


@pytest.mark.parametrize("dies", [False, True], ids=["ends", "dies before"])
async def test_its_process_starts_before_the_cluster_serves_and(tmp_path: Path, dies: bool) -> None:
    chat_letters(tmp_path)
    lines = Lines()
    door = HttpDoor(ClusterConfig(http=HttpSection(port=0)), tmp_path, lines.append)
    try:
        await eventually(lambda: asyncio.sleep(0, door._process), lambda process: process is not None, within_s=60)
        (process,) = processes(door)
        if dies:
            os.kill(process, signal.SIGKILL)
            async with serving(ScriptedOrchestrator()) as target:
                door.serve(target, model_from_proto(MODEL))
                await lines.until("curl")
            assert any("ended (status -9)" in line for line in lines)
    finally:
        await asyncio.to_thread(door.close)
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    assert dies or not lines


@pytest.mark.parametrize(
    "within_s",
    [pytest.param(math.inf, id="at some time"), pytest.param(REPLACED_S, id="in time", marks=pytest.mark.nightly)],
)
async def test_a_process_that_hangs_is_replaced_also_where_that_cannot_be_printed(
    within_s: float, tmp_path: Path
) -> None:
    lines = Unprintable()
    async with (
        opened(tmp_path, HttpSection(port=0), lines=lines) as (door, _, _other),
        httpx2.AsyncClient(base_url=door.url, timeout=60, headers={"connection": "close"}) as client,
    ):
        (former,) = processes(door)
        os.kill(former, signal.SIGSTOP)
        began_s = time.monotonic()

        async def current() -> int | None:
            return None if door._process is None else door._process.pid

        await eventually(current, lambda pid: pid not in (None, former), within_s=60)
        assert time.monotonic() - began_s < within_s
        answer = await client.post("/v1/completions", json=BODY)  # waits for the next process
        assert answer.json()["choices"][0]["text"] == text_of(3)
        assert "gave no sign of life for 5 s" in await lines.until("has ended")


async def test_running_requests_have_a_grace_when_the_door_closes(tmp_path: Path) -> None:
    hangs = [Fault(after=1, hang=True)]
    async with (
        opened(tmp_path, HttpSection(port=0, grace_s=0.2), faults=hangs) as (door, _, _other),
        httpx2.AsyncClient(base_url=door.url, timeout=60) as client,
    ):
        async with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            closing = asyncio.create_task(asyncio.to_thread(door.close))
            last = [line async for line in lines if line][-1]
        await closing
    assert "the HTTP gateway is ending" in last


async def test_it_ends_with_the_door(tmp_path: Path) -> None:
    async with opened(tmp_path, HttpSection(port=0)) as (door, _, _other):
        (process,) = processes(door)
        url = door.url
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    async with httpx2.AsyncClient() as client:
        with pytest.raises(httpx2.ConnectError):
            await client.get(f"{url}/health")


async def test_its_last_spans_are_exported_when_it_is_terminated(tmp_path: Path) -> None:
    async with (
        collector() as found,
        opened(tmp_path, HttpSection(port=0), found.endpoint) as (door, lines, _),
        httpx2.AsyncClient(base_url=door.url, timeout=60, headers={"connection": "close"}) as client,
    ):
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        os.kill(processes(door)[0], signal.SIGTERM)
        await lines.until("ended (status 0)")
        assert found.named("POST /v1/completions")


async def test_https_takes_the_configured_certificate(tmp_path: Path) -> None:
    section = HttpSection(port=0, certificate=str(CERTIFICATE), private_key=str(KEY))
    trusts = ssl.create_default_context(cafile=str(CERTIFICATE))
    async with opened(tmp_path, section) as (door, _, _other), httpx2.AsyncClient(verify=trusts) as client:
        assert (await client.get(f"{door.url}/health")).status_code == 200


def test_what_cannot_be_served_is_refused_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port} "):
            HttpDoor(ClusterConfig(http=HttpSection(port=port)), tmp_path, print)
    absent = HttpSection(certificate="/absent.pem", private_key="/absent.pem")
    with pytest.raises(ConfigError, match="http.certificate = /absent.pem cannot be used"):
        HttpDoor(ClusterConfig(http=absent), tmp_path, print)
    with pytest.raises(ConfigError, match="certificate and private_key belong together"):
        HttpSection(certificate="/absent.pem")


def test_no_port_is_no_door(tmp_path: Path) -> None:
    with http_door(ClusterConfig(http=HttpSection(port=-1)), tmp_path, print) as door:
        assert door is None
