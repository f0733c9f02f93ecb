"""Markdown table with the results of several servers for the same loads, one line per cell of the grid. Performs no
I/O."""

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.support.answers import Answered

_COLUMNS = (("tokens_s", "tokens/s"), ("ttft_s", "first token p50, s"), ("p99_ms", "p99 between messages, ms"))


def side_table(cells: Mapping[str, Mapping[str, Sequence[Answered]]], notes: Sequence[str]) -> str:
    """Return a Markdown table with one line per cell (load). It shows the median of each metric of each server over the
    rounds. `cells` contains the answers by cell and by server, with one entry per round. `notes` are lines that are
    printed below the table. All cells must have the same servers."""
    sides = list(next(iter(cells.values())))
    heads = ["streams x prompt tokens : output tokens", *(f"{title}, {' / '.join(sides)}" for _, title in _COLUMNS)]
    lines = [heads, ["---"] * len(heads)]
    for name, rounds in cells.items():
        lines.append([name, *(" / ".join(_median(rounds[side], metric) for side in sides) for metric, _ in _COLUMNS)])
    table = "\n".join(f"| {' | '.join(line)} |" if line[0] != "---" else f"|{'|'.join(line)}|" for line in lines)
    return "\n".join((table, "", *(f"- {note}" for note in notes), ""))


def _median(rounds: Sequence[Answered], metric: str) -> str:
    """Return the median of a metric: with three digits below 100, else rounded to an integer."""
    median = statistics.median(float(getattr(each, metric)) for each in rounds)
    return f"{median:,.0f}" if median >= 100 else f"{median:.3g}"
