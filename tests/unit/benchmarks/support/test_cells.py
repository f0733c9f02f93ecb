"""Cells of a grid are read from text, and ask for passages that were not asked before."""

import pytest

from benchmarks.support.cells import Cell, Joining, parse_grid
from benchmarks.support.passages import Passages


def test_a_grid_reads_as_it_is_written() -> None:
    text = "1x205:64,8x205:96+4400:16@1.5"
    cells = parse_grid(text)
    assert cells == [Cell(1, 205, 64), Cell(8, 205, 96, Joining(4400, 16, 1.5))]
    assert ",".join(str(cell) for cell in cells) == text


@pytest.mark.parametrize("text", ["", "8x205", "8x205:64+4400:16", "x205:64", "8x205:64,", "0x205:64", "1x205:1"])
def test_what_is_no_cell_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a cell|has no gaps"):
        parse_grid(text)


def test_the_prompt_that_joins_is_asked_last_and_late() -> None:
    asks = Cell(2, 30, 4, Joining(100, 3, 1.0)).asks(Passages(tuple(range(1000))))
    assert [(len(each.prompt), each.max_tokens, each.at_s) for each in asks] == [(30, 4, 0.0)] * 2 + [(100, 3, 1.0)]


def test_cells_differ_in_their_keys() -> None:
    cells = parse_grid("8x205:96,8x205:64,4x205:96,8x206:96,8x205:96+4400:16@1")
    assert len({str(cell.keys) for cell in cells}) == len(cells)
