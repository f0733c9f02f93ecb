"""Public load generators, as installed, send requests to a real gateway in front of real engines. Generators that are
not on the path are skipped."""

import asyncio
import json
import os
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.clusters.clients import HOST
from tests.support.clusters.cluster import cluster
from tests.support.models.tiny_tokenizer import chat_letters
from tests.support.tools import find_command
from tests.support.wire.http_gateway import http_gateway

pytestmark = [pytest.mark.integration, pytest.mark.ci]
NUM_REQUESTS, NUM_INPUT, NUM_OUTPUT = 4, 24, 8


async def run(name: str, arguments: Sequence[str], folder: Path, **environment: str) -> None:
    """Runs a command to its end, which is a good one."""
    command = find_command(name)
    if command is None:
        pytest.skip(f"needs {name} on the path")
    process = await asyncio.create_subprocess_exec(
        *(command, *arguments), cwd=folder, env=os.environ | environment, stdout=PIPE, stderr=STDOUT
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()[-4000:]


@pytest.mark.parametrize(("backend", "path"), [("openai-chat", "/v1/chat/completions"), ("openai", "/v1/completions")])
async def test_vllms_benchmark_of_servers(backend: str, path: str, tmp_path: Path) -> None:
    async with cluster() as made, http_gateway(f"{HOST}:{made.server.port}", chat_letters(tmp_path)) as http:
        asked = ["bench", "serve", "--backend", backend, "--base-url", http.url, "--endpoint", path]
        asked += ["--model", "letters", "--tokenizer", str(tmp_path), "--dataset-name", "random", "--ignore-eos"]
        asked += ["--random-input-len", str(NUM_INPUT), "--random-output-len", str(NUM_OUTPUT)]
        asked += ["--num-prompts", str(NUM_REQUESTS), "--max-concurrency", "2"]
        await run("vllm", (*asked, "--save-result", "--result-filename", "result.json"), tmp_path)
        result = json.loads((tmp_path / "result.json").read_text())
        assert (result["completed"], result["failed"]) == (NUM_REQUESTS, 0)
        assert result["total_output_tokens"] == NUM_REQUESTS * NUM_OUTPUT
        assert result["mean_ttft_ms"] > 0 and result["mean_itl_ms"] > 0


@pytest.mark.parametrize("api", ["chat", "completions", "responses"])
async def test_aiperf(api: str, tmp_path: Path) -> None:
    async with cluster() as made, http_gateway(f"{HOST}:{made.server.port}", chat_letters(tmp_path)) as http:
        asked = ["profile", "--model", "letters", "--url", http.url, "--endpoint-type", api, "--streaming"]
        asked += ["--tokenizer", str(tmp_path), "--concurrency", "2", "--request-count", str(NUM_REQUESTS)]
        asked += ["--synthetic-input-tokens-mean", str(NUM_INPUT), "--output-tokens-mean", str(NUM_OUTPUT)]
        asked += ["--ui-type", "none", "--artifact-dir", "made"]
        await run("aiperf", asked, tmp_path, HF_HUB_OFFLINE="")  # with a value, it reads no folder
        result = json.loads((tmp_path / "made" / "profile_export_aiperf.json").read_text())
        assert result["request_count"]["avg"] == NUM_REQUESTS
        assert result["time_to_first_token"]["avg"] > 0
        assert not result.get("error_summary"), result["error_summary"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
async def test_guidellm(path: str, tmp_path: Path) -> None:
    async with cluster() as made, http_gateway(f"{HOST}:{made.server.port}", chat_letters(tmp_path)) as http:
        backend = f"kind=openai_http,target={http.url},model=letters,request_format={path}"
        asked = ["run", "--backend", backend, "--tokenizer", f"kind=hf_auto,model={tmp_path}"]
        asked += ["--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
        asked += ["--data", f"kind=synthetic_text,prompt_tokens={NUM_INPUT},output_tokens={NUM_OUTPUT}"]
        await run("guidellm", (*asked, "--output", "kind=json,path=result.json", "--disable-progress"), tmp_path)
        (benchmark,) = json.loads((tmp_path / "result.json").read_text())["benchmarks"]
        totals = benchmark["metrics"]["request_totals"]
        assert (totals["successful"], totals["errored"]) == (NUM_REQUESTS, 0)
        assert benchmark["metrics"]["output_token_count"]["successful"]["mean"] == NUM_OUTPUT
