"""`baton simulate-traffic`: a table, JSON, a plot, and refusals in one line."""

import json
from pathlib import Path

import pytest

from deploy.cli import main
from tests.support.folders import ROOT

SHORT = ("--trace", "steady", "--rate", "20", "--seconds", "10")


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["simulate-traffic", *arguments]) == 0
    return capsys.readouterr().out


def test_the_table_has_a_line_a_policy(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    policies = "static,autoscale,queue,load,best-static"
    out = run(capsys, *SHORT, "--groups", "2:1", "--policy", policies, "--json", str(path), "--explain")
    runs = json.loads(path.read_text())
    names = ["static 2:1", "autoscale", "queue", "load", f"best-static {_best(runs)}"]
    assert list(runs) == names
    for name in names:
        (line,) = [line for line in out.splitlines() if line.strip().startswith(f"{name} ")]
        assert f"{runs[name]['ttft_s']['p95']:.3f}" in line
        assert runs[name]["num_requests"] == runs["static 2:1"]["num_requests"]
    assert out.count(" changes\n") == len(names)


def _best(runs: dict[str, object]) -> str:
    return next(name.partition(" ")[2] for name in runs if name.startswith("best-static"))


@pytest.mark.parametrize("name", ["trace_azure.csv", "trace_burstgpt.csv", "trace_mooncake.jsonl"])
def test_trace_files_are_replayed(capsys: pytest.CaptureFixture[str], name: str) -> None:
    out = run(capsys, "--trace", str(ROOT / "tests/data" / name), "--groups", "1:1", "--cached-blocks", "100")
    assert name in out and "100.0" in out


@pytest.mark.parametrize("trace", ["bursty", "diurnal", "bimodal", "shifting"])
def test_each_generator_is_there(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    out = run(capsys, "--trace", trace, "--seconds", "20", "--load", "0.3", "--groups", "2:2")
    assert out.startswith(trace)


def test_the_plot_is_a_png(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "runs.png"
    run(capsys, *SHORT, "--policy", "static,autoscale", "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--policy", "magic"], "--policy: 'magic' is unknown"),
        (["--groups", "4"], "--groups = '4'"),
        (["--groups", "0:1"], "--groups: '0'"),
        (["--max", "1"], "--max: '1'"),
        (["--load", "-1"], "--load = '-1'"),
        (["--rate", "1", "--load", "1"], "--rate and --load"),
        (["--trace", "nowhere.csv"], "nowhere.csv: cannot be read"),
        (["--step-times", "x.json"], "--calibration and --step-times"),
        (["--ttft", "0"], "--ttft = '0'"),
        (["--ttft", "0.0001"], "no rate meets the targets"),
        (["--model", "gpt-5"], "model = 'gpt-5'"),
        (["--plot", "x.pdf"], "ends in .png"),
        ([*SHORT, "--json", "/nowhere/at/all.json"], "--json = '/nowhere/at/all.json'"),
    ],
)
def test_bad_options_are_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str) -> None:
    assert main(["simulate-traffic", *arguments]) in (1, 2)
    err = capsys.readouterr().err
    assert complaint in err
    assert len([line for line in err.splitlines() if line.startswith("baton: ")]) == 1
