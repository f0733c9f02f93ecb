"""tools/cuda_measure.sh reports a missing GPU. It and cuda_serve.sh also run on a CPU in place of a GPU, and write
JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.folders import ROOT

pytestmark = pytest.mark.cluster


def cuda_measure(out: Path, device: str, script: str = "cuda_measure") -> subprocess.CompletedProcess[str]:
    given = {"DEVICE": device, "OUT": str(out), "PYTHON": sys.executable, "WHEELS": str(out / "no wheels")}
    command = [str(ROOT / f"tools/{script}.sh")]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **given}, text=True, capture_output=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_is_missing(tmp_path: Path) -> None:
    done = cuda_measure(tmp_path, "cuda")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines() == [
        "cuda_measure: missing: a GPU that torch sees: see nvidia-smi, or use DEVICE=emulated"
    ]
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.ci
def test_what_it_runs_on_a_gpu_runs_where_a_cpu_stands_for_one(tmp_path: Path) -> None:
    done = cuda_measure(tmp_path, "emulated")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    tests = rows(tmp_path / "tests.json")
    assert {row["outcome"] for row in tests} == {"passed", "skipped"}
    parts = {"overheads": "launch_us", "served": "step_ms", "steps": "step_ms", "prefill": "prefill_ms"}
    for part, metric in (parts | {"offload": "step_ms", "chain": "ttft_ms"}).items():
        assert metric in {row["metric"] for row in rows(tmp_path / f"{part}.json")}
    assert {row["users"] for row in rows(tmp_path / "steps-auto.jsonl")} == {2}
    (summary,) = rows(tmp_path / "summary.json")
    assert summary.pop("device") == "emulated"
    assert {summary[part] for part in (*parts, "tests", "kernels", "offload", "chain", "serve")} == {0}
    for shown in ("launch_us", "stack_ms", "ttft_p50_ms"):  # in the table of everything
        assert shown in done.stdout


@pytest.mark.ci
def test_a_server_is_tested_and_loaded_where_a_cpu_stands_for_a_gpu(tmp_path: Path) -> None:
    done = cuda_measure(tmp_path, "emulated", "cuda_serve")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert "1 passed" in (tmp_path / "tests.log").read_text()
    (run,) = json.loads((tmp_path / "load-2.json").read_text())["runs"]
    assert (run["summary"]["num_answered"], run["summary"]["failures"]) == (6, {})


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
