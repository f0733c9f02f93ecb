"""The table of all servers has a line for each cell, with medians in the order of the servers."""

from benchmarks.support.answers import Answer, Answered
from benchmarks.support.side_table import side_table

MS = 1_000_000


def answered(first_ms: int, gap_ms: int) -> Answered:
    """A stream of four tokens."""
    return Answered([Answer(0, tuple((first_ms + gap_ms * number) * MS for number in range(4)), 4)])


def test_lines_hold_medians_of_each_server_and_notes_follow() -> None:
    ours, theirs = [answered(100, 100), answered(200, 100), answered(900, 100)], [answered(1000, 1000)]
    table = side_table({"1x205:4": {"baton": ours, "other": theirs}}, ["other 1.0: weights Q4_1"])
    heads, rule, line, blank, note, end = table.split("\n")
    assert "tokens/s, baton / other" in heads
    assert rule == "|---|---|---|---|"
    assert line == "| 1x205:4 | 8 / 1 | 0.2 / 1 | 100 / 1,000 |"
    assert (blank, note, end) == ("", "- other 1.0: weights Q4_1", "")
