"""The cost model, calibrated on one row, against every time that the KV-Runahead paper prints. No factor is fitted."""

import dataclasses
import math

import pytest

from baton.planning.cost_model import LinkModel
from baton_lab.study.known_hardware import HARDWARE
from baton_lab.study.protocols import PAPER
from benchmarks.simulate_paper import (
    MISPRINT,
    Cell,
    SlowRow,
    calibrate,
    cost_of,
    fast_cells,
    kvr_s,
    load_tables,
    median_error,
    slow_rows,
    speedups,
)

TABLES = load_tables()
FAR_OFF = ("falcon-1b", 8192, 4)
"""The one speedup that the model does not give: docs/kv_runahead.md says why."""


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    return list(fast_cells(TABLES, calibrate(TABLES)))


@pytest.fixture(scope="module")
def slow() -> list[SlowRow]:
    return list(slow_rows(TABLES, calibrate(TABLES)))


def test_all_cells_are_there(cells: list[Cell]) -> None:
    num_rows = sum(len(rows) for rows in TABLES["ttft"].values())
    assert num_rows == 34 and len(cells) == num_rows * 2 * 3


def test_times_from_4k(cells: list[Cell]) -> None:
    """Median of |error| at most a tenth; it is 4 %."""
    assert median_error(cells, 4096) <= 0.10


@pytest.mark.parametrize("model", ["llama-7b", "llama-13b", "llama-7b-mqa", "llama-7b-gqa8", "falcon-1b", "falcon-7b"])
def test_times_from_4k_model_by_model(cells: list[Cell], model: str) -> None:
    assert median_error([cell for cell in cells if cell.model == model], 4096) <= 0.15


def test_speedups_from_8k(cells: list[Cell]) -> None:
    """Within 0.10 of every printed one but one, and that one is too high by less than a fifth."""
    worst, *others = speedups(cells, 8192)
    assert len(others) == 27
    assert [cell for cell in others if abs(cell.error) > 0.10] == []
    assert (worst.model, worst.context, worst.ranks) == FAR_OFF
    assert 0.10 < worst.error < 0.20


def test_searched_is_always_faster_than_sequence_parallel(cells: list[Cell]) -> None:
    assert all(cell.ours > 1 for cell in cells if cell.what == "speedup")


def test_grouped_heads_gain_more(cells: list[Cell]) -> None:
    """Table 2 of the paper: the less KV, the more a chain gains at 16k on 8 ranks."""
    gains = {cell.model: cell.ours for cell in speedups(cells, 16384) if cell.ranks == 8}
    assert gains["llama-7b"] < gains["llama-7b-gqa8"] < gains["llama-7b-mqa"]


def test_searched_is_within_the_papers_distance_of_no_communication() -> None:
    """17 %, Llama-7B at 16k."""
    cost = cost_of("llama-7b", calibrate(TABLES))
    no_links = dataclasses.replace(cost, link=LinkModel(), push=None, copy_s=0.0)
    for ranks in (2, 4, 8):
        assert kvr_s(16384, ranks, cost) <= 1.17 * kvr_s(16384, ranks, no_links, PAPER)


def test_best_number_of_ranks_on_slow_links(cells: list[Cell], slow: list[SlowRow]) -> None:
    """The same as in the paper for every context and link, but where its row holds the misprinted cell."""
    margin = median_error(cells, 4096)
    context, _, gb_s = MISPRINT
    rows = [row for row in slow if (row.context, row.gb_s) != (context, gb_s)]
    assert len(rows) == 9
    assert [row.best_of_ours(margin) for row in rows] == [row.best_in_paper() for row in rows]
    assert {row.best_in_paper() for row in rows} == {1, 2, 4}


def test_two_ranks_on_slow_links(slow: list[SlowRow]) -> None:
    """Within a tenth at 10 GB/s, a sixth at 1 GB/s; the misprint is left out."""
    for row in slow:
        if (row.context, 2, row.gb_s) != MISPRINT:
            most = {10: 0.10, 1: 0.17}[row.gb_s]
            assert abs(row.ours[2] / row.paper[2] - 1) <= most


def test_built_in_hardware_is_the_calibrated_one() -> None:
    found, built_in = calibrate(TABLES), HARDWARE["a100-eager"]
    for name in ("linear_flops", "pair_flops", "scores_per_s", "memory_bandwidth", "fixed_s", "issue_s"):
        assert math.isclose(getattr(found, name), getattr(built_in, name), rel_tol=1e-3), name
    assert math.isclose(found.link.latency_s, built_in.link.latency_s, rel_tol=1e-3)
    assert found.link.bandwidth == built_in.link.bandwidth
