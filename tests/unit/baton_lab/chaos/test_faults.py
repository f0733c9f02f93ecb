"""A seeded plan hits the same calls each time, and none before it begins or after it ends."""

from baton_lab.chaos.faults import Fault, SeededPlan, Strike

ALL = tuple(Fault)


def strikes(plan: SeededPlan, name: str, num_calls: int = 500) -> list[Strike | None]:
    return [plan.next(name, ALL) for _ in range(num_calls)]


def test_the_same_calls_are_hit_each_time_whatever_is_called_between() -> None:
    plan = SeededPlan()
    plan.begin(3, 0.1)
    first = strikes(plan, "Push")
    plan.begin(3, 0.1)
    strikes(plan, "Run")
    assert strikes(plan, "Push") == first
    plan.begin(4, 0.1)
    assert strikes(plan, "Push") != first


def test_as_many_are_hit_as_were_to_be_and_in_every_way() -> None:
    plan = SeededPlan()
    plan.begin(1, 0.2)
    hit = [strike for strike in strikes(plan, "Push") if strike is not None]
    assert 60 < len(hit) < 140
    assert {strike.fault for strike in hit} == set(Fault)
    assert plan.struck.total() == len(hit)


def test_outside_its_time_nothing_is_hit() -> None:
    plan = SeededPlan()
    assert not any(strikes(plan, "Push"))
    plan.begin(1, 1.0)
    assert all(strikes(plan, "Push", 5))
    plan.end()
    assert not any(strikes(plan, "Push"))
