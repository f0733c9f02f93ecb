"""A paced link carries one message after the other, and stands still while others use it."""

import itertools
import random

import pytest

from benchmarks.baselines.pacing import FULL_SPEED, LinkSchedule, Pace, bursts


def test_messages_follow_each_other() -> None:
    link = LinkSchedule(Pace(bandwidth=100.0), direction=0)
    assert link.delivered_s(10.0, 50) == pytest.approx(10.5)
    assert link.delivered_s(10.2, 100) == pytest.approx(11.5)
    assert link.delivered_s(20.0, 0) == pytest.approx(20.0)


def test_full_speed_holds_nothing_back() -> None:
    assert FULL_SPEED.is_full_speed
    assert LinkSchedule(FULL_SPEED, direction=0).delivered_s(3.0, 10**9) == 3.0


def test_a_message_stands_still_during_bursts() -> None:
    pace = Pace(bandwidth=100.0, busy_share=0.5, burst_s=0.1, seed=7)
    link = LinkSchedule(pace, direction=1)
    held = [(start, min(end, 10**9)) for start, end in itertools.islice(bursts(pace, 5.0, random.Random("7/1")), 1000)]
    delivered_s = link.delivered_s(5.0, 200)
    waited_s = sum(end - start for start, end in held if end <= delivered_s)
    assert delivered_s == pytest.approx(5.0 + 2.0 + waited_s)
    assert not any(start < delivered_s < end for start, end in held)


def test_other_traffic_takes_its_share() -> None:
    link = LinkSchedule(Pace(bandwidth=1000.0, busy_share=0.25, burst_s=0.01, seed=1), direction=0)
    assert link.delivered_s(0.0, 100_000) == pytest.approx(100 / 0.75, rel=0.05)


def test_equal_seeds_make_equal_bursts_and_directions_differ() -> None:
    pace = Pace(bandwidth=1000.0, busy_share=0.5, burst_s=0.1, seed=3)
    first, again, other = (LinkSchedule(pace, direction).delivered_s(0.0, 1000) for direction in (0, 0, 1))
    assert first == again != other


def test_delay_alone_needs_no_bandwidth() -> None:
    link = LinkSchedule(Pace(busy_share=0.9, burst_s=1.0, seed=2), direction=0)
    delays = [link.delivered_s(float(now), 10**6) - now for now in range(0, 1000, 50)]
    assert min(delays) >= 0 and max(delays) > 0.1


@pytest.mark.parametrize("fields", [{"bandwidth": 0.0}, {"busy_share": 1.0, "burst_s": 1.0}, {"busy_share": 0.5}])
def test_impossible_paces_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="give"):
        Pace(**fields)  # type: ignore[arg-type]
