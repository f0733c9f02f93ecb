"""Schemathesis sends the HTTP gateway requests that its OpenAPI document permits, and others. No answer is a server
error, violates the document or is late."""

import asyncio
import re
import sys
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

import pytest

from tests.support.clusters.scripted_orchestrator import ScriptedOrchestrator, serving
from tests.support.models.tool_templates import HERMES, tool_tokenizer
from tests.support.wire.http_gateway import http_gateway

pytestmark = pytest.mark.integration

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
MOST_S = 10
"""For one answer; the script behind answers at once."""


@pytest.mark.ci
@pytest.mark.timeout(900)
async def test_no_request_brings_a_server_error_or_hangs(tmp_path: Path) -> None:
    async with (
        serving(ScriptedOrchestrator()) as target,
        http_gateway(target, tool_tokenizer(tmp_path, HERMES)) as http,
    ):
        options = ["--checks", CHECKS, "--max-examples", "25", "--seed", "7", "--request-timeout", str(MOST_S)]
        options += ["--exclude-path", "/ready"]  # the script behind has no health service: it is not ready
        command = (str(Path(sys.executable).parent / "schemathesis"), "--no-color", "run", *options)
        process = await asyncio.create_subprocess_exec(
            *command, f"{http.url}/openapi.json", cwd=tmp_path, stdout=PIPE, stderr=STDOUT
        )
        assert process.stdout is not None
        said = (await process.stdout.read()).decode()
        status = await process.wait()
    counts = re.search(r"(\d+) generated", said)
    print(*said.splitlines()[-25:], sep="\n")  # what was asked, and how often
    assert status == 0, said
    assert counts is not None and int(counts[1]) > 500, said
