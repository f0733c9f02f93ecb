"""Bars compare a cell with the better peer. Each peer has rows. Peers that are not installed are skipped."""

import argparse
import json
from collections.abc import Mapping
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


BETTER = {"tokens_s": 100.0, "ttft_s": 1.0, "tpot_ms": 10.0, "p99_ms": 100.0}
WORSE = {"tokens_s": 50.0, "ttft_s": 2.0, "tpot_ms": 20.0, "p99_ms": 900.0}
GOOD = {"tokens_s": 131.0, "ttft_s": 0.79, "tpot_ms": 8.9, "p99_ms": 99.0}


def status(cell: Cell, ours: Mapping[str, float], **peers: Mapping[str, float]) -> int:
    """The exit status after judging a cell."""
    bars = Bars()
    rows = {
        name.replace("_", "."): {metric: row(metric, ours[metric], theirs[metric]) for metric in ours}
        for name, theirs in peers.items()
    }
    judge(bars, cell, rows)
    return bars.close()


ONE, MANY = parse_grid("1x205:64,17x205:64")


@pytest.mark.parametrize(
    ("cell", "changed", "status_of_cell"),
    [
        (ONE, {}, 0),
        (ONE, {"tokens_s": 129.0}, 1),
        (ONE, {"ttft_s": 0.81}, 1),
        (ONE, {"tpot_ms": 9.1}, 1),
        (MANY, {"tpot_ms": 9.1}, 0),
        (ONE, {"p99_ms": 101.0}, 1),
    ],
)
def test_a_cell_is_judged_by_the_better_peer(cell: Cell, changed: Mapping[str, float], status_of_cell: int) -> None:
    measured = {**GOOD, **changed}
    assert status(cell, measured, vllm=WORSE, llama_cpp=BETTER) == status_of_cell
    assert status(MANY, measured, vllm=BETTER, llama_cpp=WORSE) == (status_of_cell and "tpot_ms" not in changed)
    assert status(cell, measured, vllm=WORSE) == 0


@pytest.mark.parametrize(("p99_ms", "status_of_cell"), [(449.0, 0), (451.0, 1)])
def test_peers_whose_streams_stall_are_no_measure(p99_ms: float, status_of_cell: int) -> None:
    assert status(MANY, {**GOOD, "p99_ms": p99_ms}, vllm=WORSE, llama_cpp=WORSE) == status_of_cell


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


def test_each_peer_has_rows_and_bars_compare_with_the_better_one(capsys: pytest.CaptureFixture[str]) -> None:
    rows, exit_status = reported(found(**{BATON: 100}, vllm=200, llama_cpp=50), capsys)
    assert [each for each in rows if each[0] == "ttft_s"] == [("ttft_s", "vllm", 2.0), ("ttft_s", "llama.cpp", 0.5)]
    assert exit_status == 1
    assert reported(found(**{BATON: 10}, vllm=200), capsys)[1] == 0


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
