"""What a client is told of a request's times is what the server wrote down; what it asks is what the server reads."""

import pytest

from baton.errors import InvalidArgumentError
from baton.proto_types import (
    event_from_proto,
    event_to_proto,
    priority_from_proto,
    read,
    requests_from_proto,
    requests_to_proto,
    timings_from_proto,
    timings_to_proto,
)
from baton.results.completion import Usage
from baton.results.prefill_trace import (
    Interval,
    Placement,
    PlacementTerms,
    PrefillTrace,
    PrefixFetch,
    RankTiming,
    WidthChoice,
    WidthOption,
)
from baton.results.request_list import RequestList, RequestStatus
from baton.results.timings import DraftCounts, SpeculationTrace, Timings
from baton.types import FinishReason, Priority, SampledToken, TokenEvent, TokenOrigin, TokenRange
from baton.v1 import orchestrator_pb2

RANK = RankTiming(1, TokenRange(3, 9), 10, 20, 0.5, 11, 21, 300, 200, (Interval(10, 12), Interval(12, 20)), 2, 0.25)
WIDTH = WidthChoice(1, 2, 3, 4, (WidthOption(1, 0.5, 0.25), WidthOption(2, 0.375, 1.0)))


PLACEMENT = Placement("local_faster", PlacementTerms(1, 2, 3, 4, 5, 6), PlacementTerms(0.5, 0.25, 0, 0, 0))


@pytest.mark.parametrize(
    "timings",
    [
        Timings(1, 2, 3, 4, 5, prefill=PrefillTrace(None, WIDTH, (RANK,))),
        Timings(1, 2, 3, 4, 5, prefill=PrefillTrace(PLACEMENT)),
        Timings(1, 2, 3, 4, 5, prefill=PrefillTrace(PLACEMENT, fetch=PrefixFetch("group", 64, 9, 0.5, 0.25, "late"))),
        Timings(1, 2, 3, 4, 5, "infinigen", PrefillTrace(Placement("never"))),
        Timings(1, 2, 3, 4, 5, speculation=SpeculationTrace(9, (DraftCounts("streaming", 4, 12, 10),))),
    ],
)
def test_timings_round_trip(timings: Timings) -> None:
    assert timings_from_proto(timings_to_proto(timings)) == timings


def test_requests_round_trip() -> None:
    timings = Timings(1, 2, 3, 4, 5, prefill=PrefillTrace(PLACEMENT, WIDTH, (RANK,)))
    ended = RequestStatus(
        2, "r", "acme", "finished", "g", "p", Usage(9, 4, 2, 8), timings, (FinishReason.STOP,), "ChainError", 1
    )
    running = RequestStatus(3, "", "", "queued", "", "", Usage(9, 0, 1), Timings(1, 0, 0, 0, 0))
    requests = RequestList(7, (running, ended))
    assert requests_from_proto(requests_to_proto(requests)) == requests


@pytest.mark.parametrize("origin", [None, TokenOrigin("g0"), TokenOrigin("g0", "chain", 0.25)])
def test_a_token_s_origin_round_trips(origin: TokenOrigin | None) -> None:
    event = TokenEvent(1, SampledToken(5), "x", 7, origin=origin)
    assert event_from_proto(event_to_proto(event)) == event


def test_usage_says_what_was_cached() -> None:
    message = orchestrator_pb2.Usage(num_prompt_tokens=9, num_output_tokens=4, num_attempts=2, num_cached_tokens=8)
    assert read(Usage, message) == Usage(9, 4, 2, 8)


def test_a_choice_says_what_was_predicted_for_it() -> None:
    assert WIDTH.predicted_s == 0.5
    assert WIDTH.reason == (
        "1 of 2 ranks behind 3 of 4 jobs; predicted seconds, own + others', by width: "
        "1: 0.500 + 0.250, 2: 0.375 + 1.000"
    )


def test_a_choice_of_another_server_may_name_no_option() -> None:
    assert WidthChoice(3, 3, 0, 0, ()).predicted_s is None


@pytest.mark.parametrize("priority", Priority)
def test_priority_round_trips(priority: Priority) -> None:
    assert priority_from_proto(orchestrator_pb2.Priority.ValueType(priority)) is priority


def test_no_priority_is_standard_and_one_of_another_version_is_refused() -> None:
    assert priority_from_proto(orchestrator_pb2.PRIORITY_UNSPECIFIED) is Priority.STANDARD
    with pytest.raises(InvalidArgumentError, match=r"priority = 9 is unknown: use 1 \(interactive\), 2 \(standard\)"):
        priority_from_proto(orchestrator_pb2.GenerateRequest(priority=9).priority)  # type: ignore[arg-type]
