"""The plot's curves go along batches of one length, and along lengths of one batch."""

from benchmarks.plots.offload import along_batch, along_context
from benchmarks.support.policy_table import CellTimes


def cells(*sizes: tuple[int, int]) -> list[CellTimes]:
    return [CellTimes(batch, context, {}) for batch, context in sizes]


def sizes(curve: list[CellTimes]) -> list[tuple[int, int]]:
    return [(cell.batch, cell.context) for cell in curve]


def test_curves_are_those_with_most_cells() -> None:
    grid = cells((8, 4096), (4, 1024), (16, 1024), (8, 1024), (8, 2048), (16, 4096))
    assert sizes(along_batch(grid)) == [(4, 1024), (8, 1024), (16, 1024)]
    assert sizes(along_context(grid)) == [(8, 1024), (8, 2048), (8, 4096)]


def test_of_equals_the_larger_is_taken() -> None:
    grid = cells((2, 512), (4, 1024))
    assert sizes(along_batch(grid)) == sizes(along_context(grid)) == [(4, 1024)]
