"""`baton bench` against a real gateway in front of scripted tokens: tables, JSON, plots, exit status, refusals."""

import json
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.errors import BatonError
from deploy.cli import main
from tests.support.clusters.clients import HOST
from tests.support.clusters.cluster import cluster
from tests.support.clusters.scripted_orchestrator import Fault, ScriptedOrchestrator, serving
from tests.support.folders import ROOT
from tests.support.models.tiny_tokenizer import letter_tokenizer
from tests.support.wire.commands import Baton, Run
from tests.support.wire.http_gateway import http_gateway

pytestmark = pytest.mark.integration

TRACE = str(ROOT / "tests/data/trace_mooncake.jsonl")


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


@asynccontextmanager
async def served(service: ScriptedOrchestrator) -> AsyncIterator[dict[str, str]]:
    """Both ways to the scripted tokens, as options."""
    async with serving(service) as target, http_gateway(target, letter_tokenizer()) as http:
        yield {"--url": http.url, "--address": target}


def trace_lines() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(TRACE).read_text().splitlines()]


async def bench(baton: Baton, where: str, ways: dict[str, str], *options: str, status: int = 0) -> Run:
    run = await baton.run_beside(["bench", where, ways[where], "--seed", "7", *options])
    assert run.status == status, run
    return run


@pytest.mark.parametrize("where", ["--url", "--address"])
async def test_a_load_is_sent_and_its_numbers_add_up(where: str, tmp_path: Path, baton: Baton) -> None:
    service, path = ScriptedOrchestrator(), tmp_path / "run.json"
    options = ["--rate", "100", "--requests", "30", "--prompt-tokens", "20", "--output-tokens", "6"]
    async with served(service) as ways:
        ran = await bench(baton, where, ways, *options, "--target", "ttft=30s,tpot=9s", "--json", str(path))
    assert len(service.requests) == 32  # two of them before the load
    content = json.loads(path.read_text())
    (run,) = content["runs"]
    summary, requests = run["summary"], run["requests"]
    assert content["settings"]["seed"] == 7 and content["settings"]["model"] == "scripted"
    assert summary["num_requests"] == summary["num_answered"] == summary["num_good"] == len(requests) == 30
    assert summary["offered_rate"] == 100 and summary["failures"] == {}
    first = np.array([each["message_s"][0] - each["due_s"] for each in requests])
    assert summary["latencies"]["ttft"]["p90"] == pytest.approx(np.percentile(first, 90), abs=1e-5)
    assert {each["counts"]["num_output"] for each in requests} == {6}
    assert "30 of 30 requests answered" in ran.out and "100.0% good (ttft <= 30000 ms, tpot <= 9000 ms)" in ran.out
    (line,) = [line for line in ran.out.splitlines() if line.startswith("time to first token")]
    shown_ms = [float(number) for number in re.findall(r"\d+\.\d", line)]
    assert np.percentile(first, 90) * 1e3 in [pytest.approx(each, abs=0.06) for each in shown_ms]


async def test_a_sweep_is_compared_and_plotted(tmp_path: Path, baton: Baton) -> None:
    plot = tmp_path / "sweep.png"
    options = ["--rate", "200,50", "--requests", "10", "--output-tokens", "4", "--prompt-tokens", "8"]
    async with served(ScriptedOrchestrator()) as ways:
        run = await bench(baton, "--url", ways, *options, "--target", "e2el=9s", "--plot", str(plot))
    table = run.out.split("all loads")[1]
    assert table.index("\n50/s") < table.index("\n200/s")
    assert plot.read_bytes().startswith(b"\x89PNG")


async def test_users_ask_again_and_their_latencies_are_plotted(tmp_path: Path, baton: Baton) -> None:
    plot, service = tmp_path / "users.png", ScriptedOrchestrator()
    options = ["--concurrency", "3", "--requests", "9", "--turns", "2", "--system-tokens", "20"]
    options += ["--prompt-tokens", "20", "--output-tokens", "3"]
    async with served(service) as ways:
        run = await bench(baton, "--address", ways, *options, "--plot", str(plot))
    assert len(service.requests) == 2 + 18
    assert "18 of 18 requests answered" in run.out
    assert plot.read_bytes().startswith(b"\x89PNG")
    texts = sorted(request.prompt for request in service.requests[2:])
    assert len({text[:60] for text in texts}) == 1  # the system's
    assert len(set(texts)) == 18


async def test_a_trace_is_replayed_at_a_rate(baton: Baton, tmp_path: Path) -> None:
    service, path = ScriptedOrchestrator(), tmp_path / "run.json"
    async with served(service) as ways:
        await bench(baton, "--address", ways, "--trace", TRACE, "--rate", "100", "--json", str(path))
    lines = trace_lines()
    (run,) = json.loads(path.read_text())["runs"]
    found = sorted(run["requests"], key=lambda each: float(each["due_s"]))
    begin = lines[0]["timestamp"]
    own = (len(lines) - 1) / (lines[-1]["timestamp"] - begin) * 1e3
    expected = [(line["timestamp"] - begin) / 1e3 * own / 100 for line in lines]
    assert [each["due_s"] for each in found] == pytest.approx(expected, abs=1e-5)
    assert [each["max_tokens"] for each in found] == [line["output_length"] for line in lines]


async def test_failures_are_counted_by_kind_and_explained(baton: Baton) -> None:
    whole = Fault(after=2**31)
    service = ScriptedOrchestrator([whole, whole, Fault(after=1, error=BatonError("a bug")), whole])
    async with served(service) as ways:
        run = await bench(baton, "--address", ways, "--concurrency", "1", "--requests", "3", "--output-tokens", "3")
    assert "2 of 3 requests answered" in run.out and "1 failed: Baton, like: a bug" in run.out


async def test_a_load_without_an_answer_has_status_1(baton: Baton) -> None:
    whole = Fault(after=2**31)
    service = ScriptedOrchestrator([whole, whole, *[Fault(after=1, error=BatonError("a bug"))] * 4])
    async with served(service) as ways:
        run = await bench(
            baton, "--url", ways, "--concurrency", "2", "--requests", "4", "--target", "ttft=1s", status=1
        )
    assert "0 of 4 requests answered" in run.out and "4 failed: stream_error, like: a bug" in run.out
    assert "0.0% good" in run.out


async def test_a_server_that_answers_nothing_ends_it_in_one_line(baton: Baton) -> None:
    service = ScriptedOrchestrator([Fault(after=0, error=BatonError("a bug"))])
    async with served(service) as ways:
        run = await bench(baton, "--url", ways, "--rate", "1", status=1)
    assert run.err.startswith("baton: scripted does not answer a prompt of") and run.err.count("\n") == 1


async def test_real_engines_serve_conversations(tmp_path: Path, baton: Baton) -> None:
    path = tmp_path / "run.json"
    options = ["--rate", "20", "--requests", "4", "--turns", "2", "--prompt-tokens", "40", "--output-tokens", "8"]
    async with cluster() as made:
        ways = {"--address": f"{HOST}:{made.server.port}"}
        run = await bench(baton, "--address", ways, *options, "--json", str(path), "--target", "e2el=60s")
    summary: dict[str, Any] = json.loads(path.read_text())["runs"][0]["summary"]
    assert summary["num_answered"] == 8 and summary["num_good"] == 8
    assert summary["mean_output_tokens"] == 8
    # The second turn's prompt holds the first turn and its answer.
    assert 40 < summary["mean_prompt_tokens"] < 130
    assert "8 of 8 requests answered" in run.out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("", "no load: give --rate, --concurrency or --trace"),
        ("--rate 0", "--rate = '0' is out of range"),
        ("--rate 1 --concurrency 2", "--concurrency is a closed loop"),
        (f"--concurrency 2 --trace {TRACE}", "--concurrency is a closed loop"),
        ("--concurrency x", "--concurrency: 'x' is out of range"),
        ("--rate 1 --burstiness -1", "--burstiness = '-1' is out of range"),
        ("--rate 0.001 --seconds 0.001", "--rate 0.001: no request begins in 0.001 s"),
        ("--rate 1 --requests 0", "--requests: '0' is out of range"),
        ("--rate 1 --turns 0", "--turns: '0' is out of range"),
        ("--rate 1 --think-time x", "--think-time = 'x' is out of range"),
        ("--rate 1 --target ttft=1", "--target: ttft = '1' is not a time"),
        ("--rate 1 --timeout 0", "--timeout = '0' is out of range"),
        ("--rate 1 --text nowhere.txt", "--text: nowhere.txt cannot be read"),
        ("--rate 1 --plot x.pdf", "ends in .png"),
        ("--rate 1 --json /nowhere/at/all.json", "--json = '/nowhere/at/all.json' cannot be written"),
        ("--rate 1 --extra-body {", "--extra-body is not valid JSON"),
        ("--rate 1 --extra-body []", "--extra-body is not an object"),
        ("--rate 1 --seed -1", "--seed: '-1' is out of range"),
        ("--rate 1 --api-key-env BATON_TEST_NO_SUCH", "BATON_TEST_NO_SUCH is not set"),
        ("--trace nowhere.jsonl", "nowhere.jsonl: cannot be read"),
        (f"--trace {TRACE} --turns 2", "--trace sets the lengths of requests"),
    ],
)
def test_bad_options_are_refused(baton: Baton, arguments: str, complaint: str) -> None:
    assert complaint in baton.refusal(f"bench --url http://127.0.0.1:9 {arguments}")


def test_further_fields_go_over_http_only(baton: Baton) -> None:
    refusal = baton.refusal("bench --address 127.0.0.1:9 --rate 1 --extra-body {}")
    assert "--extra-body goes with --url" in refusal


@pytest.mark.parametrize("where", ["--url http://127.0.0.1:9", "--address 127.0.0.1:9"])
def test_no_server_is_one_line(baton: Baton, where: str) -> None:
    assert baton.refusal(f"bench {where} --rate 1", status=1).startswith("baton: no server answers at")


def test_it_says_where_one_server_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--rate", "1"])
    assert "--url --address" in capsys.readouterr().err


def test_without_aiohttp_the_extra_is_named(baton: Baton, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    refusal = baton.refusal("bench --url http://127.0.0.1:9 --rate 1 --requests 1", may_show=True)
    assert "--url needs aiohttp: run `pip install 'baton-serve[lab]'`" in refusal
