"""The base of the package is its client: it needs grpcio, protobuf and their types, and commands say what they lack."""

import asyncio
import importlib.metadata
import re
import sys
import tomllib
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from tests.support.clusters.scripted_orchestrator import ScriptedOrchestrator, serving
from tests.support.folders import ROOT

pytestmark = pytest.mark.integration

PROGRAM = """\
import sys
sys.path[:0] = sys.argv[1:3]
from baton import Client, SamplingParams
with Client(sys.argv[3]) as client:
    print(client.generate(prompt="Once", params=SamplingParams(max_tokens=3)).text())
assert not {"torch", "ray", "numpy", "pydantic"} & set(sys.modules)
"""
COMMAND = """\
import sys
sys.path[:0] = sys.argv[1:3]
from deploy.cli import main
sys.exit(main(sys.argv[3:]))
"""


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder with what the package requires without any extra, and what that requires in turn."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    left, seen = list(project["dependencies"]), set[str]()
    while left:
        name = re.split(r"[^\w-]", left.pop())[0]
        if name in seen:
            continue
        seen.add(name)
        found = importlib.metadata.distribution(name)
        left += [each for each in found.requires or () if "extra ==" not in each]
        for file in found.files or ():
            if ".." not in file.parts and file.suffix != ".pyc":
                place = tmp_path / file
                place.parent.mkdir(parents=True, exist_ok=True)
                place.symlink_to(file.locate())
    assert {"grpcio", "protobuf"} <= seen < {"grpcio", "protobuf", "googleapis-common-protos", "typing-extensions", "x"}
    return tmp_path


async def test_a_client_needs_nothing_else(packages: Path) -> None:
    async with serving(ScriptedOrchestrator()) as target:
        status, out, err = await run(PROGRAM, packages, target)
    assert (status, out.split(), err) == (0, ["0", "1", "2", "tail"], "")


async def test_a_command_that_needs_more_names_the_extra(packages: Path) -> None:
    status, out, err = await run(COMMAND, packages, "serve")
    assert (status, out) == (1, ""), err
    line = r"baton: package \w+ cannot be imported \(.*\): run `pip install 'baton-serve\[serve\]'`\n"
    assert re.fullmatch(line, err)
    status, out, _ = await run(COMMAND, packages, "--help")
    assert status == 0 and "baton [-h]" in out


async def run(program: str, packages: Path, *arguments: str) -> tuple[int | None, str, str]:
    """Run a program with those packages and the checkout's; return its exit status and what it printed."""
    command = (sys.executable, "-I", "-S", "-c", program, str(ROOT), str(packages), *arguments)
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()
