"""What benchmarks.decode says of a cell: rows beside every baseline, verdicts of every bar; a plot that is a PNG."""

import json
from pathlib import Path

import pytest

from baton.planning.chips import Chip
from baton_lab.study.roofline import ServedModel, step_time
from benchmarks.decode import Cell, Outcome, bare, report
from benchmarks.plots.decode import Step, draw, floor_s
from benchmarks.support.harness import Bars, Pairs, Reporter
from generate_workers.engine.status import StepStats

pytestmark = pytest.mark.integration

STATS = StepStats(16, 0, 0.03, num_kv_bytes=70_000_000, num_weight_bytes=270_000_000, num_link_bytes=0)
CHIP = Chip(5e11, 2e10, 1e10)
MODEL = ServedModel(num_params=1.35e8, kv_token_bytes=23_040)


def outcome(ours_ms: float, theirs_ms: float, predicted_ms: float, cell: str = "16x192") -> Outcome:
    return Outcome(Cell.parse(cell), Pairs([ours_ms] * 3, [theirs_ms] * 3), STATS, 17.0, 18.0, predicted_ms)


def verdict(made: Outcome, dtype: str = "bfloat16") -> int:
    bars = Bars()
    report(made, f"batch=16,context=192,dtype={dtype},threads=2", "vllm", Reporter("decode", as_json=True), bars)
    return bars.close()


def test_a_cell_stands_beside_every_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    assert verdict(outcome(26.0, 32.0, 25.0)) == 0
    out, err = capsys.readouterr()
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["baseline"], row["value"], row["baseline_value"]) for row in rows] == [
        ("vllm", 26.0, 32.0),
        ("floor", 26.0, 17.0),
        ("operations", 26.0, 18.0),
        ("roofline", 26.0, 25.0),
        ("weights", 7e7, 2.7e8),
    ]
    assert "KV 70.0 MB, weights 270.0 MB, floor 17.0 ms; measured 26.0 ms, 1.53 x the floor" in err
    assert "predicted 25.0 ms, 0.96 x measured" in err


@pytest.mark.parametrize(
    ("made", "dtype", "missed"),
    [
        (outcome(26.0, 29.0, 26.0), "bfloat16", "of vLLM's step: 0.897, at most 0.85"),
        (outcome(28.0, 64.0, 28.0), "bfloat16", "of its operations' time: 1.556, at most 1.5"),
        (outcome(26.0, 32.0, 32.0), "bfloat16", "the prediction is off by: 0.231, at most 0.2"),
        (outcome(13.0, 13.0, 13.0, "1x192"), "int8", "of vLLM's step: 1.000, at most 0.65"),
    ],
)
def test_a_missed_bar_is_said(made: Outcome, dtype: str, missed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert verdict(made, dtype) == 1
    assert missed in capsys.readouterr().err
    assert verdict(outcome(13.0, 13.0, 13.0, "1x192")) == 0


def test_operations_take_what_reading_or_computing_takes() -> None:
    chip = bare(Chip(4e11, 2e10, 1e10, kv_bandwidth=1e10, overlap=0.2, layer_s=1e-4), prompt_flops=5e11)
    assert chip == CHIP
    assert bare(CHIP, prompt_flops=1e11) == CHIP
    found = step_time(MODEL, chip, batch=64, context=1024)
    computed_s, read_s = 64 * 2 * 1.35e8 / 5e11, 64 * 1024 * 23_040 / 2e10
    assert found.total_s == pytest.approx(computed_s + read_s)


def test_plot_is_a_png(tmp_path: Path) -> None:
    measured = [Step(1, 192, 26.0), Step(16, 192, 30.0), Step(16, 1024, 40.0)]
    draw(measured, MODEL, CHIP, tmp_path / "plot.png")
    data = (tmp_path / "plot.png").read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 10_000


def test_a_step_is_no_faster_than_one_read_of_weights_and_kv() -> None:
    model = ServedModel(num_params=1e8, kv_token_bytes=2e4, num_layers=30)
    assert floor_s(model, 2e10, batch=10, context=1000) == pytest.approx((2e8 + 2e8) / 2e10)
