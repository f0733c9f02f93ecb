"""Prints all measurements of tools/cuda_measure.sh in one table. Each value is shown with its baseline.

`python -m tools.cuda_table FOLDER` reads the results of `benchmarks.cuda` in the folder's files.
"""

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

_ROWS = "*.json"
_NUMBERS = ("value", "baseline_value", "ratio")


def rows_of(folder: Path) -> list[dict[str, object]]:
    """Return the measurements in a folder's files, the oldest file first. Incomplete lines, which remain if a run
    reaches its time limit, are skipped."""
    found = []
    for file in sorted(folder.glob(_ROWS), key=lambda each: each.stat().st_mtime):
        for line in file.read_text().splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(row, dict) and "baseline_value" in row:
                found.append(row)
    return found


def main(folder: str) -> int:
    """Print the table of the measurements in a folder. Return the exit status."""
    table = Table(Column("case", overflow="fold"), "metric", "value", "compared with", "its value", "ratio")
    for row in rows_of(Path(folder)):
        numbers = ["-" if row[name] is None else f"{row[name]:.4g}" for name in _NUMBERS]
        table.add_row(str(row["case"]), str(row["metric"]), numbers[0], str(row["baseline"]), *numbers[1:])
    Console(highlight=False).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
