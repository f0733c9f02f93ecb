"""What a cluster of one's own says is read to its end, whatever comes."""

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton_lab.served_child import _Child
from deploy.commands.record import ClusterRecord, process_start

pytestmark = pytest.mark.integration

LONG = 1 << 20
"""More than a line may have, and than a pipe holds."""


@pytest.fixture(autouse=True)
def record(cache: Path) -> None:
    """Of the cluster, as its launcher has left it."""
    ClusterRecord("own", os.getpid(), process_start(os.getpid()), "h:1", "", "h:2").save()


@asynccontextmanager
async def child(script: str, heard: list[str]) -> AsyncIterator[_Child]:
    """Of a process that runs the script."""

    def report(line: str) -> None:
        heard.append(line)
        if line == "a bad line":
            raise OSError("the terminal is gone")

    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stderr=asyncio.subprocess.PIPE)
    made = _Child(process, "own", report)
    try:
        yield made
        await asyncio.wait_for(process.wait(), 60)  # which it cannot, before all was read
        await asyncio.wait({made._following}, timeout=60)
    finally:
        await made.end()


def saying(*lines: str) -> str:
    return "import sys\n" + "\n".join(f"print({line}, file=sys.stderr, flush=True)" for line in lines)


async def test_a_line_that_is_too_long_does_not_end_the_reading() -> None:
    heard: list[str] = []
    async with child(saying(f"'x' * {LONG}", "'ready: now'", "'and on'"), heard) as made:
        assert (await asyncio.wait_for(made.ready(), 60)).endpoint == "h:2"
    assert heard[-2:] == ["ready: now", "and on"]


async def test_a_line_that_cannot_be_passed_on_once_it_serves_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[str] = []
    async with child(saying("'ready: now'", "'a bad line'", "'and on'"), heard) as made:
        await asyncio.wait_for(made.ready(), 60)
    assert heard[-2:] == ["a bad line", "and on"]
    assert "the terminal is gone" in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


async def test_a_line_that_cannot_be_passed_on_before_that_is_the_owners_to_see() -> None:
    async with child(saying("'a bad line'"), []) as made:
        with pytest.raises(OSError, match="the terminal is gone"):
            await asyncio.wait_for(made.ready(), 60)
