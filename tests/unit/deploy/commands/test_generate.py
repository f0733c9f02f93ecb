"""`baton generate` as a process of its own, against a real server with scripted streams."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from dataclasses import dataclass

import pytest

from baton.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError
from baton.v1 import generate_pb2, orchestrator_pb2
from tests.support.clusters.scripted_orchestrator import Fault, ScriptedOrchestrator, serving, text_of
from tests.support.folders import ROOT

pytestmark = pytest.mark.integration

WAIT_S = 60.0


@dataclass(frozen=True)
class Run:
    """What a command left."""

    status: int
    out: str
    err: str


async def start(*arguments: str, stdin: int = DEVNULL) -> Process:
    command = (sys.executable, "-m", "deploy.cli", "generate", *arguments)
    return await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=stdin, stdout=PIPE, stderr=PIPE)


async def ended(process: Process, stdin: bytes | None = None) -> Run:
    out, err = await asyncio.wait_for(process.communicate(stdin), WAIT_S)
    assert process.returncode is not None
    return Run(process.returncode, out.decode(), err.decode())


async def run_against(service: ScriptedOrchestrator, *arguments: str, stdin: bytes | None = None) -> Run:
    async with serving(service) as target:
        pipe = DEVNULL if stdin is None else PIPE
        return await ended(await start("--target", target, *arguments, stdin=pipe), stdin)


async def test_text_goes_out_and_usage_beside_it() -> None:
    run = await run_against(ScriptedOrchestrator(), "Once", "--max-tokens", "3")
    assert (run.status, run.out) == (0, text_of(3) + "\n")
    assert run.err.startswith("5 prompt tokens, 3 output tokens; finish: length; first token after 2.00 s; all after")
    assert "seed 77" in run.err and run.err.count("\n") == 1


async def test_usage_is_left_out_on_request() -> None:
    run = await run_against(ScriptedOrchestrator(), "Once", "--max-tokens", "1", "--no-usage")
    assert (run.out, run.err) == (text_of(1) + "\n", "")


async def test_prompt_is_read_from_standard_input() -> None:
    service = ScriptedOrchestrator()
    run = await run_against(service, "-", "--max-tokens", "1", "--temperature", "0.5", "--seed", "3", stdin=b"A\nnovel")
    assert run.status == 0
    sent = service.requests[0]
    assert (sent.prompt, sent.sampling.temperature, sent.sampling.seed, sent.seeded) == (b"A\nnovel", 0.5, 3, True)


async def test_chat_is_sent_as_a_users_message() -> None:
    service = ScriptedOrchestrator()
    await run_against(service, "--chat", "Hi", "--max-tokens", "1", "--deadline", "20")
    sent = service.requests[0]
    assert [(message.role, message.content) for message in sent.chat.messages] == [("user", "Hi")]
    assert 0 < sent.deadline_ms <= 20_000


async def test_who_asks_and_how_urgent_it_is_are_sent() -> None:
    service = ScriptedOrchestrator()
    options = ("--priority", "batch", "--tenant", "acme", "--api-key-env", "BATON_TEST_KEY")
    async with serving(service) as target:
        command = (sys.executable, "-m", "deploy.cli", "generate", "--target", target, "Once", "--max-tokens", "1")
        env = {**os.environ, "BATON_TEST_KEY": "k-1"}
        process = await asyncio.create_subprocess_exec(
            *command, *options, cwd=ROOT, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env=env
        )
        assert (await ended(process)).status == 0
    assert service.requests[0].priority == orchestrator_pb2.PRIORITY_BATCH
    assert service.metadata[0]["authorization"] == "Bearer k-1"
    assert service.metadata[0]["baton-tenant"] == "acme"


async def test_lost_connection_is_a_pause_and_no_more() -> None:
    service = ScriptedOrchestrator([Fault(after=2, error=UnavailableError("gone"))])
    run = await run_against(service, "Once", "--max-tokens", "4")
    assert (run.status, run.out) == (0, text_of(4) + "\n")
    assert "resumed after 1 lost connections" in run.err and run.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--target", "127.0.0.1:1"], 1, "127.0.0.1:1 cannot be reached"),
        (["--temperature", "-1"], 2, "sampling.temperature = -1.0"),
        (["--api-key-env", "BATON_NO_SUCH_KEY"], 2, "environment variable BATON_NO_SUCH_KEY is not set: export it\n"),
    ],
)
async def test_refusals_are_one_line(arguments: list[str], status: int, said: str) -> None:
    run = await ended(await start("Once", *arguments))
    assert (run.status, run.out) == (status, "")
    assert run.err.startswith(f"baton: {said}") and run.err.count("\n") == 1


async def test_refused_request_is_one_line() -> None:
    refusal = Fault(before_started=True, error=InvalidArgumentError("prompt is too long: 600 tokens, at most 512"))
    run = await run_against(ScriptedOrchestrator([refusal]), "Once")
    assert run == Run(2, "", "baton: prompt is too long: 600 tokens, at most 512\n")


async def test_passed_deadline_keeps_what_came() -> None:
    passed = Fault(after=2, finish=generate_pb2.FINISH_REASON_DEADLINE, error=DeadlineExceededError("deadline passed"))
    run = await run_against(ScriptedOrchestrator([passed]), "Once", "--deadline", "20")
    assert (run.status, run.out) == (1, text_of(2) + "\n")
    assert run.err.endswith("baton: deadline passed\n") and "2 output tokens; finish: deadline" in run.err


async def test_ctrl_c_cancels_the_request() -> None:
    service = ScriptedOrchestrator([Fault(after=2, hang=True)])
    async with serving(service) as target:
        process = await start("--target", target, "Once")
        await asyncio.wait_for(service.hanging.wait(), WAIT_S)
        assert process.stdout is not None
        shown = await asyncio.wait_for(process.stdout.readexactly(4), WAIT_S)
        process.send_signal(signal.SIGINT)
        run = await ended(process)
        await asyncio.wait_for(service.cancelled.wait(), WAIT_S)
    assert (run.status, shown.decode() + run.out) == (130, "0 1 \n")
    assert "2 output tokens" in run.err and "Traceback" not in run.err


async def test_closed_pipe_ends_the_request_quietly() -> None:
    service = ScriptedOrchestrator()
    async with serving(service) as target:
        process = await asyncio.create_subprocess_shell(
            f"{sys.executable} -m deploy.cli generate --target {target} --max-tokens 20000 Once | head -c 4",
            cwd=ROOT,
            stdout=PIPE,
            stderr=PIPE,
        )
        run = await ended(process)
    assert run.out == "0 1 " and "Traceback" not in run.err and "Exception" not in run.err
