"""A schedule is a function of its seed, and does what its shape allows."""

from dataclasses import replace

import pytest

from baton_lab.chaos.schedule import Act, Schedule, Shape

SHAPE = Shape(("prefill-0.0", "generate-0", "orchestrator"), vocab_size=50, num_asks=200, num_blows=30)


def test_a_seed_always_gives_the_same_schedule() -> None:
    assert Schedule.of(7, SHAPE) == Schedule.of(7, SHAPE)
    assert Schedule.of(7, SHAPE) != Schedule.of(8, SHAPE)


def test_all_that_may_happen_does() -> None:
    schedule = Schedule.of(1, SHAPE)
    assert {blow.victim for blow in schedule.blows} == set(SHAPE.victims)
    assert {blow.act for blow in schedule.blows} == {Act.KILL, Act.STOP}
    leaves = [ask.leave.after_events for ask in schedule.asks if ask.leave is not None]
    assert {0, 1, 2} < set(leaves) and len(leaves) < len(schedule.asks) / 2
    assert any(ask.deadline_s is not None for ask in schedule.asks)
    assert {ask.params.n for ask in schedule.asks} == {1, 2}
    assert 0 < schedule.rate <= SHAPE.max_rate


def test_blows_come_in_order_and_while_there_are_tokens() -> None:
    schedule = Schedule.of(2, SHAPE)
    moments = [blow.after_tokens for blow in schedule.blows]
    assert moments == sorted(moments)
    assert moments[-1] < sum(ask.params.max_tokens for ask in schedule.asks if ask.leave is None)


@pytest.mark.parametrize("seed", range(5))
def test_engines_hang_or_are_slow_and_a_slow_one_is_spared_other_blows(seed: int) -> None:
    engines = ("generate-0", "generate-1")
    shape = replace(SHAPE, victims=(*engines, "orchestrator"), engines=engines)
    plain, disturbed = Schedule.of(seed, shape), Schedule.of(seed, replace(shape, num_hung=1, num_slow=1))
    added = [blow for blow in disturbed.blows if blow.act in (Act.HANG, Act.SLOW)]
    assert {blow.act for blow in added} == {Act.HANG, Act.SLOW} and {blow.victim for blow in added} == {*engines}
    (slow,) = (blow.victim for blow in added if blow.act is Act.SLOW)
    spared = tuple(blow for blow in plain.blows if blow.victim != slow)
    assert spared == tuple(blow for blow in disturbed.blows if blow not in added)
    assert (disturbed.asks, disturbed.rate) == (plain.asks, plain.rate)
    assert list(disturbed.blows) == sorted(disturbed.blows, key=lambda blow: blow.after_tokens)


def test_prompts_of_a_stem_are_beginnings_of_each_other() -> None:
    by_stem: dict[int, list[tuple[int, ...]]] = {}
    for ask in Schedule.of(3, SHAPE).asks:
        assert len(ask.prompt_ids) == ask.num_prompt_tokens <= SHAPE.max_prompt_tokens
        assert all(0 <= token_id < SHAPE.vocab_size for token_id in ask.prompt_ids)
        by_stem.setdefault(ask.stem, []).append(ask.prompt_ids)
    assert len(by_stem) > 1
    for prompts in by_stem.values():
        longest = max(prompts, key=len)
        assert all(longest[: len(each)] == each for each in prompts)


def test_in_peace_the_same_is_asked_and_nothing_happens() -> None:
    schedule = Schedule.of(4, SHAPE)
    calm = schedule.calm
    assert [(ask.prompt_ids, ask.params) for ask in calm.asks] == [
        (ask.prompt_ids, ask.params) for ask in schedule.asks
    ]
    assert (calm.blows, calm.rate) == ((), 0)
    assert not any(ask.leave or ask.deadline_s for ask in calm.asks)


@pytest.mark.parametrize("seed", [5, 6])
def test_a_schedule_says_what_it_will_do(seed: int) -> None:
    schedule = Schedule.of(seed, SHAPE)
    lines = str(schedule).splitlines()
    assert lines[0].startswith(f"seed {seed}: 200 requests, ")
    assert lines[1:] == [
        f"  after {blow.after_tokens} tokens: {blow.act.value} {blow.victim}" for blow in schedule.blows
    ]
