"""Commands and programs of the documents that speak HTTP are answered by a gateway, as they are written."""

import asyncio
import re
import shlex
import sys
from pathlib import Path

import httpx2
import pytest

from tests.support.clusters.scripted_orchestrator import MODEL, ScriptedOrchestrator, serving
from tests.support.folders import ROOT
from tests.support.models.tiny_tokenizer import chat_letters, ids_of
from tests.support.wire.http_gateway import http_gateway

pytestmark = pytest.mark.integration

TEXT = "Because."
URL, NAME = "http://127.0.0.1:8000", "smollm2-135m"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = [
    pytest.param(language, block, id=f"{path.name}-{number}")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for number, (language, block) in enumerate(BLOCK.findall(path.read_text()))
    if f"curl {URL}/v1" in block or "from openai import" in block
]


async def post(command: str) -> str:
    """Send what a curl command sends. Return the text of the answer."""
    words = shlex.split(command.replace("\\\n", " "), comments=True)
    assert words.count("curl") == 1
    url, *options = words[words.index("curl") + 1 :]
    given = dict(zip(options[::2], options[1::2], strict=True))
    assert given.keys() == {"-H", "-d"}
    name, _, value = given["-H"].partition(": ")
    async with httpx2.AsyncClient() as client:
        answer = await client.post(url, headers={name: value}, content=given["-d"])
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


async def run(program: str) -> str:
    """Run a Python program in a process of its own. Return what it prints."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    printed, _ = await process.communicate()
    assert process.returncode == 0
    return printed.decode()


@pytest.mark.parametrize(("language", "block"), BLOCKS)
async def test_what_documents_send_is_answered(language: str, block: str, tmp_path: Path) -> None:
    service = ScriptedOrchestrator(words=[(ids_of(letter)[0], letter) for letter in TEXT])
    async with serving(service) as target, http_gateway(target, chat_letters(tmp_path)) as http:
        own = block.replace(URL, http.url).replace(NAME, MODEL.name)
        assert await (run(own) if language == "python" else post(own)) == TEXT


def test_the_pages_that_show_http_are_among_them() -> None:
    assert {str(each.id).split("-")[0] for each in BLOCKS} >= {"README.md", "http.md"} and len(BLOCKS) == 5
