"""The clock of a step's parts counts each moment once, and a breakdown says what no part has."""

from collections.abc import Iterator

import pytest

from benchmarks.support.step_parts import Breakdown, Part, PartClock


def clock_at(*times_s: float) -> PartClock:
    """Return a clock that reads these times, one at each entry and each exit of a part."""
    times: Iterator[float] = iter(times_s)
    return PartClock(lambda: next(times))


def test_time_between_parts_is_in_none() -> None:
    clock = clock_at(1.0, 3.0, 10.0, 14.0)
    with clock.part(Part.LINEAR):
        pass
    with clock.part(Part.ATTENTION):
        pass
    assert clock.spent_s == {Part.TRANSFER: 0.0, Part.POLICY: 0.0, Part.ATTENTION: 4.0, Part.LINEAR: 2.0}


@pytest.mark.parametrize(("inner", "inner_s", "policy_s"), [(Part.TRANSFER, 5.0, 3.0), (Part.LINEAR, 0.0, 8.0)])
def test_of_what_a_policy_s_turn_does_only_waiting_is_not_its_own(inner: Part, inner_s: float, policy_s: float) -> None:
    clock = clock_at(0.0, 1.0, 6.0, 8.0)
    with clock.part(Part.POLICY), clock.part(inner):
        pass
    assert (clock.spent_s[inner], clock.spent_s[Part.POLICY]) == (inner_s, policy_s)


def test_a_part_that_fails_is_left() -> None:
    clock = clock_at(0.0, 2.0, 5.0, 6.0)
    with pytest.raises(ValueError, match="broken"), clock.part(Part.POLICY):
        raise ValueError("broken")
    with clock.part(Part.LINEAR):
        pass
    assert clock.spent_s[Part.POLICY] == 2.0
    assert clock.spent_s[Part.LINEAR] == 1.0


def parts(transfer: float, policy: float, attention: float, linear: float) -> dict[Part, float]:
    return dict(zip(Part, (transfer, policy, attention, linear), strict=True))


def test_a_breakdown_is_of_medians_and_the_rest() -> None:
    rounds = [parts(1.0, 2.0, 3.0, 4.0), parts(2.0, 2.0, 3.0, 4.0), parts(9.0, 2.0, 3.0, 4.0)]
    found = Breakdown("host", plain_ms=[10.0, 11.0, 20.0], timed_ms=[10.0, 12.0, 20.0], parts_ms=rounds)
    assert found.other_ms == [0.0, 1.0, 2.0]
    assert found.medians_ms() == {"transfer": 2.0, "policy": 2.0, "attention": 3.0, "linear": 4.0, "other": 1.0}
    assert found.other_share == pytest.approx(1 / 12)
    assert found.times_plain == pytest.approx(1.0)
