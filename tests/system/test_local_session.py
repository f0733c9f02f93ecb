"""One prompt through `baton local`: the answer on standard output, and what it took on standard error."""

from pathlib import Path

import pytest

from tests.support.clusters.ray_clusters import run_baton

OPTIONS = ("--colocated", "--dtype", "float32", "--threads", "1", "--max-tokens", "12", "--ignore-eos")
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
