"""What is promised beside vLLM, cell by cell."""

import pytest

from benchmarks.served import judge
from benchmarks.support.cells import Cell, parse_grid
from benchmarks.support.harness import Bars, Row


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
