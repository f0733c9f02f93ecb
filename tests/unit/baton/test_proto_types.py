"""What a client is told of a request's times is what the server wrote down."""

import pytest

from baton.proto_types import timings_from_proto, timings_to_proto
from baton.results import Interval, RankTiming, Timings, WidthChoice, WidthOption
from baton.types import TokenRange

RANK = RankTiming(1, TokenRange(3, 9), 10, 20, 0.5, 11, 21, 300, 200, (Interval(10, 12), Interval(12, 20)), 2, 0.25)
WIDTH = WidthChoice(1, 2, 3, 4, (WidthOption(1, 0.5, 0.25), WidthOption(2, 0.375, 1.0)))


@pytest.mark.parametrize("timings", [Timings(1, 2, 3, 4, 5, (RANK,), WIDTH), Timings(1, 2, 3, 4, 5, (), None)])
def test_timings_round_trip(timings: Timings) -> None:
    assert timings_from_proto(timings_to_proto(timings)) == timings


def test_a_choice_says_what_was_predicted_for_it() -> None:
    assert WIDTH.predicted_s == 0.5
    assert WIDTH.reason == (
        "1 of 2 ranks behind 3 of 4 jobs; predicted seconds, own + others', by width: "
        "1: 0.500 + 0.250, 2: 0.375 + 1.000"
    )


def test_a_choice_of_another_server_may_name_no_option() -> None:
    assert WidthChoice(3, 3, 0, 0, ()).predicted_s is None
