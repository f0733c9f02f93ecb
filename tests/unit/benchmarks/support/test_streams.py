"""Throughput is that of the window in which all streams generate; spans add up to what the client waited."""

import pytest

from baton.results.prefill_trace import PrefillTrace, RankTiming
from baton.results.timings import Timings
from baton.types import TokenRange
from benchmarks.sides.served import split
from benchmarks.support.streams import Measured, StreamTimes, make_load

MS = 1_000_000


def _stream(asked_ms: int, first_ms: int, *tokens_ms: int) -> StreamTimes:
    return StreamTimes(asked_ms * MS, first_ms * MS, tuple(ms * MS for ms in tokens_ms))


def test_only_what_all_streams_did_together_counts() -> None:
    early = _stream(0, 101, *range(100, 600, 100))
    late = _stream(0, 301, *range(300, 1000, 100))
    measured = Measured((early, late))
    assert measured.window_ns == (300 * MS, 500 * MS)
    assert measured.tokens_s == pytest.approx(4 / 0.2)
    assert measured.ttft_s == pytest.approx(0.201)
    assert measured.step_ms == pytest.approx(100)


def test_streams_that_never_met_are_no_measurement() -> None:
    measured = Measured((_stream(0, 1, 1, 2, 3), _stream(0, 5, 5, 6, 7)))
    with pytest.raises(ValueError, match="ask for more output tokens"):
        _ = measured.tokens_s


def test_equal_seeds_make_equal_loads() -> None:
    assert make_load(2, 8, 4, seed=1) == make_load(2, 8, 4, seed=1) != make_load(2, 8, 4, seed=2)


def test_spans_add_up() -> None:
    ranks = tuple(
        RankTiming(rank, TokenRange(rank, rank + 1), start * MS, end * MS, 0.0, start * MS, push * MS, 1, 1, ())
        for rank, start, end, push in ((0, 8, 40, 41), (1, 9, 50, 49))
    )
    timings = Timings(2 * MS, 3 * MS, 5 * MS, 55 * MS, 60 * MS, prefill=PrefillTrace(ranks=ranks))
    spans = split(_stream(0, 58, 55), timings)
    assert spans == {
        "in": 2, "queue": 1, "reserve": 2, "dispatch": 3, "chain": 42, "push_tail": 0, "commit_join": 5, "out": 3
    }  # fmt: skip
