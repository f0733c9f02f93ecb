"""`baton simulate-traffic`: a table, JSON, a plot, and refusals in one line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.planning.hardware import Hardware
from baton_lab.study.known_hardware import HARDWARE
from tests.support.folders import DATA
from tests.support.wire.commands import Baton

SHORT = "simulate-traffic --trace steady --rate 20 --seconds 10"


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


def test_the_table_has_a_line_a_policy(baton: Baton, tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    policies = "static,autoscale,queue,load,best-static"
    out = baton.shown(f"{SHORT} --groups 2:1 --policy {policies} --json {path} --explain")
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
def test_trace_files_are_replayed(baton: Baton, name: str) -> None:
    out = baton.shown(f"simulate-traffic --trace {DATA / name} --groups 1:1 --cached-blocks 100")
    assert name in out and "100.0" in out


@pytest.mark.parametrize("trace", ["bursty", "diurnal", "bimodal", "shifting"])
def test_each_generator_is_there(baton: Baton, trace: str) -> None:
    out = baton.shown(f"simulate-traffic --trace {trace} --seconds 20 --load 0.3 --groups 2:2")
    assert out.startswith(trace)


def test_the_plot_is_a_png(baton: Baton, tmp_path: Path) -> None:
    path = tmp_path / "runs.png"
    baton.shown(f"{SHORT} --policy static,autoscale --plot {path}")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_this_machine_is_simulated_by_its_rates(
    baton: Baton, tmp_path: Path, keep_core: Callable[[Hardware], None]
) -> None:
    def results(hardware: str, title: str) -> dict[str, object]:
        path = tmp_path / "runs.json"
        model = f"--model smollm2-135m --hardware {hardware}"
        out = baton.shown(f"simulate-traffic --trace steady --rate 2 --seconds 10 --groups 2:1 {model} --json {path}")
        assert out.startswith(f"steady on {title}: ")
        found: dict[str, object] = json.loads(path.read_text())
        return found

    nominal, core = results("here", "here (nominal rates: `baton calibrate` measures them)"), results(*["cpu-core"] * 2)
    assert nominal == core
    keep_core(HARDWARE["h100-flash"])
    assert results("here", "here (measured rates)") == results(*["h100-flash"] * 2) != core


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--policy magic", "--policy: 'magic' is unknown"),
        ("--groups 4", "--groups = '4'"),
        ("--groups 0:1", "--groups: '0'"),
        ("--max 1", "--max: '1'"),
        ("--load -1", "--load = '-1'"),
        ("--rate 1 --load 1", "--rate and --load"),
        ("--trace nowhere.csv", "nowhere.csv: cannot be read"),
        ("--hardware abacus", "hardware = 'abacus' is unknown: use one of a100-eager"),
        ("--ttft 0", "--ttft = '0'"),
        ("--ttft 0.0001", "no rate meets the targets"),
        ("--model gpt-5", "model = 'gpt-5'"),
        ("--plot x.pdf", "ends in .png"),
        ("--trace steady --rate 20 --seconds 10 --json /nowhere/at/all.json", "--json = '/nowhere/at/all.json'"),
    ],
)
def test_bad_options_are_refused(baton: Baton, arguments: str, complaint: str) -> None:
    run = baton.run(f"simulate-traffic {arguments}")
    assert run.status in (1, 2) and complaint in run.err
    assert len([line for line in run.err.splitlines() if line.startswith("baton: ")]) == 1
