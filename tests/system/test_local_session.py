"""One prompt through `baton local`: the answer is on standard output, and its timings are on standard error."""

from pathlib import Path

import pytest

from tests.support.clusters.on_ray.ray_clusters import run_baton

pytestmark = pytest.mark.integration

OPTIONS = ("--colocated", "--dtype", "float32", "--threads", "1", "--max-tokens", "12", "--ignore-eos")
PROMPT = "Elizabeth listened in silence, but was not convinced; their behaviour at the assembly had not been"
EMULATED = ("prefill.device=emulated", "generate.device=emulated", "device.link=4GBps")
DRAFTS = ("generate.speculation=auto", "generate.draft_tokens=2")


@pytest.mark.ci
def test_a_streams_drafts_are_drawn_with_its_tokens(smollm2: Path, tmp_path: Path) -> None:
    settings = [part for each in DRAFTS for part in ("--set", each)]
    shown = run_baton(tmp_path, "local", "--model", str(smollm2), *OPTIONS, *settings, "One, two, one, two, one,")
    assert shown.returncode == 0, shown.stderr
    assert "12 output tokens" in shown.stderr
    lines = shown.stderr.splitlines()
    (drafts,) = [number for number, line in enumerate(lines) if "steps, drafts accepted: " in line]
    assert lines[drafts + 1].startswith("tokens")


@pytest.mark.ci
@pytest.mark.parametrize("residency", ["device", "host"])
def test_devices_with_memory_of_their_own_give_the_same_answer(smollm2: Path, tmp_path: Path, residency: str) -> None:
    def answer(*assignments: str) -> str:
        settings = [part for each in assignments for part in ("--set", each)]
        options = ("--dtype", "float32", "--max-tokens", "12")
        shown = run_baton(tmp_path, "local", "--model", str(smollm2), *options, *settings, PROMPT)
        assert shown.returncode == 0, shown.stderr
        return shown.stdout

    assert answer(*EMULATED, f"generate.residency={residency}") == answer() != ""
