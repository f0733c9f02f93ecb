import re
import subprocess

import pytest

from tests.support.folders import ROOT

pytestmark = pytest.mark.integration


def stage(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "tools" / "stage.sh", "a stage", *command], text=True, capture_output=True, timeout=60
    )


def test_stage_that_ends_well_is_one_line() -> None:
    run = stage("sh", "-c", "echo out; echo error >&2")
    assert run.returncode == 0
    assert re.fullmatch(r"a stage \.\.\. \d+ s\n", run.stdout)
    assert run.stderr == ""


def test_stage_that_fails_shows_what_its_command_said() -> None:
    run = stage("sh", "-c", "echo out; echo error >&2; exit 3")
    assert run.returncode == 3
    assert re.fullmatch(r"a stage \.\.\. failed after \d+ s: sh -c .*\n", run.stdout)
    assert run.stderr == "out\nerror\n"
