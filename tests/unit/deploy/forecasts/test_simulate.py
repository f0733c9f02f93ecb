"""`baton simulate`: tables that say what the cost model says, one-line refusals, a plot that is a PNG."""

import re
import sys
from pathlib import Path

import pytest

from deploy.cli import main
from planning.calibration import save
from planning.chain.search import search
from planning.chain.wavefront import chain_ttft
from planning.cost_model import BATON, PAPER, Kernel
from planning.hardware import HARDWARE, derive
from planning.model_shape import SHAPES
from planning.study.peers import single
from tests.support.calibrating import calibrate


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["simulate", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def numbers(out: str, first: str) -> list[list[float]]:
    """The rows that begin with a word, as numbers."""
    rows = [line.split() for line in out.splitlines() if line.split()[:1] == [first]]
    return [[float(word) for word in row if re.fullmatch(r"[\d.]+", word)] for row in rows]


def test_table_holds_the_predictions(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "--ranks", "4", "--contexts", "8k")
    cost = derive(SHAPES["llama-3.1-8b"], HARDWARE["h100-flash"])
    searched = float(chain_ttft(search(8192, 4, cost, BATON), cost, BATON))
    times, by_ranks = numbers(out, "8192")
    assert times[1] == pytest.approx(single(8192, cost, Kernel.CAUSAL), abs=1e-4)
    assert times[3] == by_ranks[2] == pytest.approx(searched, abs=1e-4)
    assert len(times) == 10
    assert sum(by_ranks[4:]) == pytest.approx(100, abs=2)


@pytest.mark.parametrize("ranks", ["2", "2,4,8"])
def test_tables_fit_80_columns(capsys: pytest.CaptureFixture[str], ranks: str) -> None:
    out = shown(capsys, "--ranks", ranks, "--contexts", "1k,128k")
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in out


def test_slow_links_move_tokens_to_the_last_rank(capsys: pytest.CaptureFixture[str]) -> None:
    row = numbers(shown(capsys, "--link-gb-s", "1", "--ranks", "4", "--contexts", "8k"), "8192")[1]
    assert row[-1] == 76


def test_paper_protocol_on_the_papers_machine(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--model llama-7b --hardware a100-eager --protocol paper --ranks 4 --contexts 16k"
    row = numbers(shown(capsys, *arguments.split()), "16384")[0]
    cost = derive(SHAPES["llama-7b"], HARDWARE["a100-eager"])
    assert row[3] == pytest.approx(float(chain_ttft(search(16384, 4, cost, PAPER), cost, PAPER)), abs=1e-3)
    assert row[3] == pytest.approx(1.24, rel=0.05)
    assert row[5] == pytest.approx(1.76, rel=0.05)


def test_every_number_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    """One layer, one head of one column, one FLOP each: 2 weights for q and o, 2 for k and v, 2 for a plain FFN."""
    shape = "num_layers=1,hidden=1,num_heads=1,num_kv_heads=1,head_dim=1,ffn=1,vocab=1,gated=0"
    rates = "--linear-tflop-s 1e-12 --attention-tflop-s 1e-12 --link-us 0 --link-gb-s 1 --push-gb-s 1"
    row = numbers(shown(capsys, "--shape", shape, *rates.split(), "--ranks", "2", "--contexts", "10"), "10")[0]
    assert row[1] == 12 * 10 + 4 * 50 + 2


def test_cached_tokens_and_push_take_longer(capsys: pytest.CaptureFixture[str]) -> None:
    plain = numbers(shown(capsys, "--ranks", "2", "--contexts", "4k"), "4096")[0]
    cached = numbers(shown(capsys, "--ranks", "2", "--contexts", "4k", "--cached", "64k"), "4096")[0]
    pushed = numbers(shown(capsys, "--ranks", "2", "--contexts", "4k", "--push-gb-s", "0.5"), "4096")[0]
    assert cached[3] > 1.5 * plain[3] and pushed[3] > 1.5 * plain[3]
    assert pushed[5] == plain[5]


def test_calibration_file_takes_the_place_of_model_and_hardware(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prefill = tuple((float(n), 0.02 + 2e-4 * n + 5e-8 * n * n) for n in (256, 512, 1024, 2048))
    messages = tuple((float(size), 1e-4 + size / 2e9) for size in (1e4, 1e6, 1e8))
    shape = SHAPES["smollm2-135m"]
    made = calibrate("smollm2", "2 CPUs", shape, kernel=Kernel.CAUSAL, prefill_points=prefill, link_points=messages)
    save(made, tmp_path / "here.json")
    out = shown(capsys, "--calibration", str(tmp_path / "here.json"), "--ranks", "2", "--contexts", "1k")
    assert "smollm2 on 2 CPUs, links 2 GB/s and 100 us" in out
    assert numbers(out, "1024")[0][1] == pytest.approx(0.02 + 2e-4 * 1024 + 5e-8 * 1024**2, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--ranks 0", "--ranks: '0' is out of range: use whole numbers from 1 to 64"),
        ("--ranks 2,two", "--ranks: 'two'"),
        ("--contexts 8kk", "--contexts: '8kk'"),
        ("--cached -1", "--cached: '-1'"),
        ("--link-gb-s 0", "--link-gb-s = '0' is out of range: use a number above 0"),
        ("--link-us nan", "--link-us = 'nan'"),
        ("--push-gb-s fast", "--push-gb-s = 'fast'"),
        ("--model gpt-5", "model = 'gpt-5' is unknown: use one of llama-7b"),
        ("--hardware abacus", "hardware = 'abacus' is unknown: use one of a100-eager"),
        ("--protocol http", "--protocol = 'http' is unknown: use one of paper"),
        ("--shape num_layers", "--shape: 'num_layers' is no FIELD=NUMBER"),
        ("--shape num_layers=2", "--shape: hidden is missing"),
        ("--shape depth=2", "--shape: depth is no field"),
        ("--calibration no.json", "no.json: cannot be read (No such file or directory)"),
        ("--calibration no.json --hardware cpu-core", "--calibration and --hardware say the same: leave one out"),
        ("--shape num_layers=2 --model llama-7b", "--shape and --model say the same"),
        ("--contexts 64 --ranks 2 --plot plot.jpg", "--plot = 'plot.jpg': the plot is a PNG"),
        ("--contexts 64 --ranks 2 --plot no/folder/plot.png", "cannot be written (No such file or directory)"),
    ],
)
def test_refusals_are_one_line_with_field_and_remedy(
    capsys: pytest.CaptureFixture[str], arguments: str, text: str
) -> None:
    assert main(["simulate", *arguments.split()]) == 2
    err = capsys.readouterr().err
    assert text in err and err.startswith("baton: ") and err.count("\n") == 1


def test_plot_is_a_png(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shown(capsys, "--ranks", "2,4", "--contexts", "64,1k", "--plot", str(tmp_path / "plot.png"))
    data = (tmp_path / "plot.png").read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 10_000


def test_without_matplotlib_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    plot = str(tmp_path / "plot.png")
    assert main(["simulate", "--ranks", "2", "--contexts", "64", "--plot", plot]) == 2
    assert "--plot needs matplotlib: run `pip install 'baton-serve[plot]'`" in capsys.readouterr().err
