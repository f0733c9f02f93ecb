"""`baton http` in a separate process, in front of real engines, used by OpenAI's own client over HTTP and HTTPS."""

import asyncio
import signal
import ssl
import sys
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from pathlib import Path

import httpx2
import pytest
from openai import AsyncOpenAI

from baton import AsyncClient
from tests.support.clusters.clients import HOST
from tests.support.clusters.cluster import cluster
from tests.support.folders import ROOT
from tests.support.models.tiny_tokenizer import write_letters
from tests.support.wire.http_gateway import http_process

pytestmark = pytest.mark.integration

PROMPT = "Once upon a time"
DATA = ROOT / "tests" / "data"
CERTIFICATE, KEY = DATA / "localhost_certificate.pem", DATA / "localhost_key.pem"


@pytest.mark.parametrize(
    "more",
    [("--host", "::1"), ("--no-console", "--certificate", str(CERTIFICATE), "--private-key", str(KEY))],
    ids=["IPv6", "HTTPS"],
)
async def test_openais_client_gets_what_batons_gets_and_a_signal_lets_answers_end(
    more: Sequence[str], tmp_path: Path
) -> None:
    async with cluster() as made:
        target = f"{HOST}:{made.server.port}"
        async with (
            http_process(target, write_letters(tmp_path), *more) as (process, url),
            AsyncClient(target) as direct,
        ):
            expected = await direct.generate(PROMPT, max_tokens=200, temperature=0.8, seed=4, ignore_eos=True).collect()
            trusts = httpx2.AsyncClient(verify=ssl.create_default_context(cafile=str(CERTIFICATE)))
            assert (await trusts.get(f"{url}/console/")).status_code == (404 if "--no-console" in more else 200)
            async with AsyncOpenAI(base_url=f"{url}/v1", api_key="any", http_client=trusts, max_retries=0) as client:
                stream = await client.completions.create(
                    model=(await direct.model()).name,
                    prompt=PROMPT,
                    max_tokens=200,
                    temperature=0.8,
                    seed=4,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                text = ""
                async for chunk in stream:
                    if not text:
                        process.send_signal(signal.SIGTERM)
                    text += chunk.choices[0].text
            assert text == expected.text
            assert await asyncio.wait_for(process.wait(), 20) == 0


async def test_an_absent_server_is_said_in_one_line(tmp_path: Path) -> None:
    arguments = ("http", "--target", f"{HOST}:1", "--model", str(write_letters(tmp_path)))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "deploy.cli", *arguments, cwd=ROOT, stderr=PIPE
    )
    _, errors = await process.communicate()
    assert process.returncode == 1
    last = errors.decode().splitlines()[-1]
    assert last.startswith(f"baton: no server answers at {HOST}:1") and last.endswith("check --target")
