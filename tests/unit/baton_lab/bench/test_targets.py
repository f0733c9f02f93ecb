"""Targets: what options may say of a good request."""

import pytest

from baton.errors import InvalidArgumentError
from baton_lab.bench.targets import parse_targets, target_words


def test_targets_are_seconds_by_metric() -> None:
    targets = parse_targets(["ttft=500ms", "tpot = 50 ms,e2el=2.5s"])
    assert targets == pytest.approx({"ttft": 0.5, "tpot": 0.05, "e2el": 2.5})
    assert target_words(targets) == "ttft <= 500 ms, tpot <= 50 ms, e2el <= 2500 ms"
    assert parse_targets([]) == {}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("latency=1s", "'latency=1s' does not name one of ttft, tpot, e2el"),
        ("ttft", "ttft = '' is not a time"),
        ("ttft=500", "ttft = '500' is not a time"),
        ("ttft=-1s", "ttft = '-1s' is not a time"),
        ("ttft=0ms", "ttft = '0ms' is not a time"),
        ("ttft=1s,ttft=2s", "ttft is named twice"),
    ],
)
def test_a_target_that_bounds_nothing_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^--target: {complaint}"):
        parse_targets([text])
