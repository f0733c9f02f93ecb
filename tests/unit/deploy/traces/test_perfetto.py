"""What a file for Perfetto holds of a request."""

import json
from typing import Any

from baton.results.completion import Usage
from baton.results.prefill_trace import Interval, PrefillTrace, RankTiming
from baton.results.timings import Timings
from baton.types import FinishReason, TokenRange
from deploy.traces.perfetto import perfetto_json
from orchestrator.observability.stages import Trace
from orchestrator.requests.record import FailedAttempt

US = 1000


def rank(number: int, start_us: int, end_us: int) -> RankTiming:
    middle = (start_us + end_us) // 2
    layers = (Interval(start_us * US, middle * US), Interval(middle * US, end_us * US))
    tokens = TokenRange(number * 5, number * 5 + 5)
    return RankTiming(number, tokens, start_us * US, end_us * US, 0.0, middle * US, (end_us + 5) * US, 77, 10, layers)


def events() -> list[dict[str, Any]]:
    marks = (1000 * US, 1010 * US, 1020 * US, 1200 * US, 1900 * US)
    timings = Timings(*marks, prefill=PrefillTrace(ranks=(rank(0, 1030, 1100), rank(1, 1040, 1130))))
    failures = (FailedAttempt(1, 1015 * US, "UnavailableError", "gone"),)
    trace = Trace("abc", Usage(10, 4, 2), timings, (FinishReason.LENGTH,), failures=failures)
    found: list[dict[str, Any]] = json.loads(perfetto_json(trace))["traceEvents"]
    return found


def test_stages_follow_each_other_on_the_request_s_row() -> None:
    spans = [(each["name"], each["ts"], each["dur"]) for each in events() if each["ph"] == "X" and each["tid"] == 1]
    assert spans == [
        ("queue", 0, 10),
        ("placement", 10, 10),
        ("prefill", 20, 110),
        ("transfer", 130, 5),
        ("insert", 135, 65),
        ("decode", 200, 700),
    ]


def test_ranks_have_rows_of_their_own_with_their_layers() -> None:
    found = events()
    names = {each["tid"]: each["args"]["name"] for each in found if each["name"] == "thread_name"}
    assert list(names.values()) == ["request", "rank 0", "rank 0, pushed", "rank 1", "rank 1, pushed"]
    rows: dict[str, list[tuple[str, float]]] = {name: [] for name in names.values()}
    for each in found:
        if each["ph"] == "X":
            rows[names[each["tid"]]].append((each["name"], each["ts"]))
    assert rows["rank 1"] == [("prefill_rank", 40), ("layer 0", 40), ("layer 1", 85)]
    assert rows["rank 1, pushed"] == [("transfer_rank", 85)]


def test_failed_attempts_are_instants() -> None:
    (failure,) = [each for each in events() if each["ph"] == "i"]
    assert (failure["ts"], failure["args"]["error"]) == (15, "UnavailableError") and "dur" not in failure
