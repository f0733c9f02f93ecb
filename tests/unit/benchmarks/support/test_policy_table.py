"""A table of policies compares rounds in pairs: with the policy that streams all KV, and with the ideal."""

import pytest
from rich.console import Console

from benchmarks.support.policy_table import CellTimes, policy_table

CELL = CellTimes(
    4,
    1024,
    {"device": [20.0, 10.0, 40.0], "host": [80.0, 60.0, 200.0], "infinigen": [40.0, 10.0, 50.0]},
)


def test_ratios_are_medians_of_the_rounds() -> None:
    assert CELL.speedup("infinigen") == pytest.approx(4.0)  # of 2, 6 and 4
    assert CELL.share_of_ideal("infinigen") == pytest.approx(0.8)  # of 0.5, 1 and 0.8
    assert CELL.speedup("device") == pytest.approx(5.0)  # of 4, 6 and 5


def test_a_policy_is_its_own_measure() -> None:
    assert CELL.speedup("host") == 1.0
    assert CELL.share_of_ideal("device") == 1.0


def test_the_table_has_a_line_for_each_policy_and_a_column_for_each_cell() -> None:
    table = policy_table([CELL, CellTimes(8, 2048, CELL.times_ms)])
    assert [column.header for column in table.columns] == ["policy", "4 x 1024", "8 x 2048"]
    console = Console(width=120)
    with console.capture() as shown:
        console.print(table)
    line = next(line for line in shown.get().splitlines() if "infinigen" in line)
    assert line.count("40.0 ms, 4.00 x, 80%") == 2
