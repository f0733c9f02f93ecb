"""What processes log, as collectors of logs read it."""

import json
import subprocess
import sys
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.support.folders import ROOT

pytestmark = pytest.mark.integration

PROGRAM = """
import asyncio, logging
from baton.process.request_log import SERVED_REQUEST
from deploy.options.logs import set_up_logs

set_up_logs(logging.INFO, {form!r})
logger = logging.getLogger("some.module")

async def serve(request_id):
    SERVED_REQUEST.set(request_id)
    await asyncio.sleep(0)
    logger.info("served %d tokens", 7)

async def main():
    logger.info("up")
    logger.debug("nobody sees this")
    await asyncio.gather(serve("a"), serve("b"))
    try:
        raise ValueError("no such")
    except ValueError:
        logger.exception("failed")

asyncio.run(main())
"""


def logged(form: str) -> list[str]:
    command = [sys.executable, "-c", PROGRAM.format(form=form)]
    run = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True)
    assert not run.stdout
    return run.stderr.splitlines()


def test_lines_are_objects_that_name_their_requests() -> None:
    lines: list[dict[str, Any]] = [json.loads(line) for line in logged("json")]
    assert [(each["message"], each.get("request_id")) for each in lines] == [
        ("up", None),
        ("served 7 tokens", "a"),
        ("served 7 tokens", "b"),
        ("failed", None),
    ]
    assert {(each["logger"], each["level"]) for each in lines[:3]} == {("some.module", "INFO")}
    assert "ValueError: no such" in lines[3]["exc_info"]
    for each in lines:
        assert datetime.fromisoformat(each["time"]).utcoffset() == timedelta(0) and each["pid"] > 0


def test_lines_are_text_by_default() -> None:
    lines = logged("text")
    assert lines[0].endswith("some.module INFO up") and lines[-1] == "ValueError: no such"
    with pytest.raises(json.JSONDecodeError):
        json.loads(lines[0])
