"""What is promised beside vLLM, cell by cell; rows for each peer; peers that are left out."""

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.served import BATON, Found, installed_peers, judge, report
from benchmarks.support import harness
from benchmarks.support.answers import Answer, Answered
from benchmarks.support.cells import Cell, parse_grid
from benchmarks.support.harness import Bars, Reporter, Row
from tests.support.models.tiny_gguf import tiny_keys, tiny_tensors, write_gguf


def row(metric: str, value: float, baseline: float) -> Row:
    """A row of a metric; a rate is better when larger."""
    ratio = value / baseline if metric == "tokens_s" else baseline / value
    return Row("served", "", metric, value, "", "vllm", baseline, ratio)


def status(cell: Cell, rate: float, ttft_s: float, p99_ms: float, their_p99_ms: float) -> int:
    """The exit status after judging a cell in which vLLM has 100 tokens/s and a first token after a second."""
    bars = Bars()
    rows = [row("tokens_s", rate, 100.0), row("ttft_s", ttft_s, 1.0), row("p99_ms", p99_ms, their_p99_ms)]
    judge(bars, cell, {each.metric: each for each in rows})
    return bars.close()


SHORT, MANY, LONG = parse_grid("16x205:64,17x205:64,1x6450:16")


@pytest.mark.parametrize(
    ("cell", "measured", "holds"),
    [
        (SHORT, (111.0, 0.99, 119.0, 100.0), True),
        (SHORT, (109.0, 0.99, 119.0, 100.0), False),
        (MANY, (109.0, 0.99, 119.0, 100.0), True),
        (SHORT, (111.0, 1.01, 119.0, 100.0), False),
        (LONG, (111.0, 0.84, 119.0, 100.0), True),
        (LONG, (111.0, 0.86, 119.0, 100.0), False),
        (SHORT, (111.0, 0.99, 121.0, 100.0), False),
        (SHORT, (111.0, 0.99, 499.0, 1000.0), True),
        (SHORT, (111.0, 0.99, 501.0, 1000.0), False),
    ],
)
def test_a_cell_is_judged_by_its_bars(cell: Cell, measured: tuple[float, float, float, float], holds: bool) -> None:
    assert status(cell, *measured) == (0 if holds else 1)


MS = 1_000_000


def found(**first_ms: int) -> Found:
    """A round of one stream of three tokens, 10 ms apart, for each server."""
    rounds = Found()
    for name, first in first_ms.items():
        times = tuple((first + 10 * number) * MS for number in range(3))
        rounds.answers[name.replace("_", ".")].append(Answered([Answer(0, times, 3)]))
    return rounds


@pytest.fixture(autouse=True)
def no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The note of the machine runs git, which a unit test may not."""
    monkeypatch.setattr(harness, "describe_machine", lambda: "this machine")


def reported(rounds: Found, capsys: pytest.CaptureFixture[str]) -> tuple[list[tuple[str, str, float | None]], int]:
    """Metric, baseline and ratio of all rows of a cell, and the exit status that its bars lead to."""
    bars = Bars()
    report(Reporter("served", as_json=True), bars, Cell(1, 205, 3), rounds)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [(each["metric"], each["baseline"], each["ratio"]) for each in rows], bars.close()


def test_each_peer_has_rows_and_bars_compare_with_vllm_alone(capsys: pytest.CaptureFixture[str]) -> None:
    rows, exit_status = reported(found(**{BATON: 100}, vllm=200, llama_cpp=50), capsys)
    assert [each for each in rows if each[0] == "ttft_s"] == [("ttft_s", "vllm", 2.0), ("ttft_s", "llama.cpp", 0.5)]
    assert exit_status == 0
    assert reported(found(**{BATON: 100}, vllm=50), capsys)[1] == 1


def test_without_peers_rows_have_no_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    rows, exit_status = reported(found(**{BATON: 100}), capsys)
    assert {(baseline, ratio) for _, baseline, ratio in rows} == {("none", None)}
    assert exit_status == 0


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A file in the place of a peer's program, which is not run."""
    path = tmp_path / "program"
    path.touch()
    return path


def peers_with(**options: object) -> tuple[list[str], list[str]]:
    """Names of the peers that these options lead to, and the lines that are printed about others."""
    defaults = {"model": "folder", "dtype": "float32", "peer_python": None, "peer_model": None, "llama_server": None}
    lists: dict[str, list[str]] = {"peer_env": [], "peer_option": [], "llama_option": []}
    args = argparse.Namespace(**{**defaults, **lists, "llama_model": None, **options})
    lines: list[str] = []
    return [each.name for each in installed_peers(args, [0], 2, say=lines.append)], lines


def test_a_peer_that_is_not_installed_is_left_out_with_its_script_named(program: Path, tmp_path: Path) -> None:
    names, lines = peers_with(peer_python=tmp_path / "missing")
    assert names == []
    assert ["setup_vllm_cpu.sh" in lines[0], "setup_llamacpp.sh" in lines[1], len(lines)] == [True, True, 2]
    names, lines = peers_with(peer_python=program, peer_model=tmp_path)
    assert (names, len(lines)) == (["vllm"], 1)
    for line in lines:
        (script,) = (word for word in line.split() if word.endswith(".sh"))
        assert (Path(__file__).parents[3] / script).is_file()


def test_llama_cpp_needs_a_gguf_file(program: Path, tmp_path: Path) -> None:
    names, lines = peers_with(llama_server=program)
    assert names == []
    assert lines[1] == "without llama.cpp: folder is not a GGUF file: give one with --llama-model"
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", tiny_keys("llama"), tiny_tensors("llama"))
    assert peers_with(llama_server=program, llama_model=path)[0] == ["llama.cpp"]
    assert peers_with(llama_server=program, model=str(path))[0] == ["llama.cpp"]
