"""`baton chaos` on real processes: they are killed and stopped by signals, the orchestrator's among them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.folders import ROOT
from tests.support.models.letter_models import write_letter_model

pytestmark = pytest.mark.integration


def chaos(log: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deploy.cli", "chaos", "--log", str(log), *options]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)


def rows(output: str) -> list[list[str]]:
    """Of the table, without its head."""
    return [line.split() for line in output.splitlines()[1:]]


PLAIN = ("--set", "generate.speculation=off")
SPECULATING = ("--set", "generate.speculation=auto", "--set", "generate.residency=host")


EMULATED = (*SPECULATING, "--set", "prefill.device=emulated", "--set", "generate.device=emulated")


@pytest.mark.ci
@pytest.mark.parametrize(
    "settings",
    [pytest.param(PLAIN, marks=pytest.mark.nightly), SPECULATING, EMULATED],
    ids=["plain", "speculating", "emulated"],
)
def test_a_seed_is_replayed_on_a_cluster_of_its_own(tmp_path: Path, settings: tuple[str, ...]) -> None:
    model = str(write_letter_model(tmp_path))
    log = tmp_path / "chaos.log"
    done = chaos(log, "--seed", "2", "--requests", "12", "--blows", "2", "--model", model, *settings)
    assert done.returncode == 0, done.stdout + done.stderr + log.read_text()[-4000:]
    (row,) = rows(done.stdout)
    assert (row[0], row[-1]) == ("2", "ok")


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_sample_model_survives_five_seeds(smollm2: Path, tmp_path: Path) -> None:
    log = tmp_path / "chaos.log"
    done = chaos(log, "--seeds", "5", "--model", str(smollm2))
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr + log.read_text()[-4000:]
    assert [row[-1] for row in rows(done.stdout)] == ["ok"] * 5
