"""Rounds are planned by what drafts cost and bring: against trying every number of drafts, and the paper's formula."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.planning.speculation import MOST_DRAFTS, DraftOptions, Round, plan_at_rate, plan_round
from baton.planning.work_cost import StepWork, WorkCost, expected_tokens

COST = WorkCost(step_s=20e-3, token_s=0.4e-3, key_s=1.6e-6, pair_s=0.3e-6)
"""Costs of a machine that is bound by reading."""


SMALL = WorkCost(step_s=2e-3, token_s=0.05e-3, key_s=0.4e-6, pair_s=0.1e-6)
"""Costs of a small model that drafts."""


KEYS, SHARES = st.sampled_from([0, 64, 256]), st.sampled_from([0.0, 0.3, 0.7, 0.99, 1.0])
COSTS = st.sampled_from([0.0, 1e-9, 1e-6, 1e-3])


@dataclass(frozen=True)
class Option:
    """One way to draft for a sequence."""

    context: int
    acceptance: float
    most_drafts: int
    draft_keys: int


def table(rows: Sequence[Sequence[Option]]) -> DraftOptions:
    """The options of all sequences; sequences with fewer options than others have further ones without drafts."""
    width = max(map(len, rows))
    padded = [[*each, *[Option(each[0].context, 0.0, 0, 0)] * (width - len(each))] for each in rows]
    return DraftOptions(
        np.array([each[0].context for each in padded]),
        np.array([[option.acceptance for option in each] for each in padded]),
        np.array([[option.most_drafts for option in each] for each in padded]),
        np.array([[option.draft_keys for option in each] for each in padded]),
    )


def plan(rows: Sequence[Sequence[Option]], draft_cost: WorkCost | None = None) -> Round:
    return plan_round(table(rows), COST, draft_cost)


def seconds(rows: list[Option], numbers: tuple[int, ...], draft_cost: WorkCost = COST) -> float:
    """Seconds of a round with these drafts, by its steps one after another."""
    total = 0.0
    for depth in range(max(numbers)):
        keys = [min(row.draft_keys, row.context) for row, num in zip(rows, numbers, strict=True) if num > depth]
        if any(keys):
            drafting = [each for each in keys if each]
            total += draft_cost.seconds(StepWork(len(drafting), sum(drafting), sum(drafting)))
    num_keys = sum(row.context for row in rows)
    num_pairs = sum((1 + num) * row.context for row, num in zip(rows, numbers, strict=True))
    return total + COST.seconds(StepWork(len(rows) + sum(numbers), num_keys, num_pairs))


def best_by_trying(offers: list[list[Option]], draft_cost: WorkCost) -> float:
    """The most expected tokens a second of all rounds."""
    rates = []
    for rows in map(list, itertools.product(*offers)):
        for numbers in itertools.product(*(range(row.most_drafts + 1) for row in rows)):
            tokens = sum(expected_tokens(row.acceptance, num) for row, num in zip(rows, numbers, strict=True))
            rates.append(tokens / seconds(rows, numbers, draft_cost))
    return max(rates)


def rate_of(offers: list[list[Option]], planned: Round, draft_cost: WorkCost) -> float:
    """The round's rate; its numbers are those that its drafts have by the formulas."""
    numbers = tuple(planned.num_drafts_B.tolist())
    rows = [each[place] if num else each[0] for each, place, num in zip(offers, planned.chosen_B, numbers, strict=True)]
    tokens = sum(expected_tokens(row.acceptance, num) for row, num in zip(rows, numbers, strict=True))
    assert planned.num_tokens == pytest.approx(tokens)
    assert planned.draft_s + planned.verify_s == pytest.approx(seconds(rows, numbers, draft_cost))
    return planned.rate


@pytest.mark.parametrize("draft_cost", [COST, SMALL], ids=["itself", "small"])
@pytest.mark.parametrize("seed", range(20))
def test_a_round_is_the_best_of_all(seed: int, draft_cost: WorkCost) -> None:
    """Rows can be drafted for in one way, or in two."""
    chance = random.Random(seed)
    rows = []
    for _ in range(4):
        context, num_offers = chance.randrange(100, 9000), chance.choice((1, 2))
        rows.append(
            [
                Option(context, chance.uniform(0.1, 0.95), chance.randrange(0, 4), chance.choice((0, 256)))
                for _ in range(num_offers)
            ]
        )
    planned = plan(rows, None if draft_cost is COST else draft_cost)
    assert rate_of(rows, planned, draft_cost) >= best_by_trying(rows, draft_cost) * (1 - 1e-9)


@pytest.mark.parametrize("acceptance", [0.3, 0.7, 0.9])
def test_equal_rows_get_the_best_equal_number(acceptance: float) -> None:
    rows = [Option(4096, acceptance, 8, 256)] * 16
    rates = [16 * expected_tokens(acceptance, num) / seconds(rows, (num,) * 16) for num in range(9)]
    assert plan([[row] for row in rows]).rate >= max(rates) * (1 - 1e-9)


def test_drafts_that_do_not_pay_are_not_made() -> None:
    short = [Option(256, 0.8, 8, 256)]
    assert plan([short]).num_drafts_B.tolist() == [0]
    hopeless = [Option(8000, 0.0, 8, 256)] * 16
    assert set(plan([[row] for row in hopeless]).num_drafts_B.tolist()) == {0}
    assert plan([[Option(8000, 0.9, 0, 256)]] * 3).num_drafts_B.tolist() == [0, 0, 0]


def test_a_row_takes_the_way_that_brings_most_for_its_time() -> None:
    """Drafts that take no step, where each is less likely accepted, unless it is too unlikely."""
    own = Option(1000, 0.9, 8, 256)
    for acceptance, place in ((0.7, 1), (0.05, 0)):
        planned = plan([[own, Option(1000, acceptance, 8, 0)]] * 16)
        assert set(planned.chosen_B.tolist()) == {place}
        assert min(planned.num_drafts_B) > 0


def test_a_small_model_drafts_where_the_model_itself_does_not_pay() -> None:
    short = [[Option(256, 0.8, 8, 256)]]
    assert plan(short).num_drafts_B.tolist() == [0]
    assert plan(short, SMALL).num_drafts_B[0] > 2


def test_more_drafts_for_rows_that_accept_more() -> None:
    rows = [Option(4096, acceptance, 8, 256) for acceptance in (0.5, 0.7, 0.9)] * 4
    numbers = plan([[row] for row in rows]).num_drafts_B
    assert numbers[0] <= numbers[1] <= numbers[2]
    assert numbers[2] > 0


@pytest.mark.parametrize("num_rows", [1, 16, 64])
@pytest.mark.parametrize("context", [300, 3000, 9000])
def test_planning_late_loses_little(num_rows: int, context: int) -> None:
    """In 1,000 rounds whose sequences grow, end and quote themselves now and then, and whose acceptance drifts."""
    chance = np.random.default_rng(17)
    contexts_B = chance.integers(context // 2, context, num_rows)
    acceptance_B, quotes_left_B = chance.uniform(0.5, 0.95, num_rows), np.zeros(num_rows, np.int64)
    best, last = np.zeros(2), None
    late = np.zeros(2)
    for index in range(1000):
        quotes_left_B = np.where(chance.random(num_rows) < 0.05, chance.integers(4, 60, num_rows), quotes_left_B)
        acceptance_B = (acceptance_B + chance.normal(0, 0.01, num_rows)).clip(0.1, 0.97)
        contexts_B = np.where(chance.random(num_rows) < 0.01, context // 2, contexts_B + 2)
        options = DraftOptions(
            contexts_B,
            np.stack([np.full(num_rows, 0.7), acceptance_B], 1),
            np.stack([quotes_left_B.clip(0, 8), np.full(num_rows, 8)], 1),
            np.stack([np.zeros(num_rows, np.int64), np.full(num_rows, 256)], 1),
        )
        full = plan_round(options, COST)
        last = full if last is None or index % 4 == 0 else plan_at_rate(options, COST, None, last)
        best += full.num_tokens, full.draft_s + full.verify_s
        late += last.num_tokens, last.draft_s + last.verify_s
        quotes_left_B = (quotes_left_B - full.num_drafts_B - 1).clip(0)
    assert late[0] / late[1] >= 0.99 * best[0] / best[1]


def test_a_late_plan_is_never_worse_than_a_normal_step_and_charges_the_steps_that_it_makes() -> None:
    """After costs have changed, and where sequences may get fewer drafts than before."""
    rows = [[Option(8000, 0.9, 8, 256)]] * 4
    last = plan(rows)
    assert last.num_steps > 2
    short = plan_at_rate(table([[Option(8000, 0.9, 2, 256)]] * 4), COST, None, last)
    assert short.num_steps == 2 and short.draft_s == pytest.approx(2 * (0.02 + 4 * (0.4e-3 + 256 * 1.6e-6)))
    slow = WorkCost(step_s=20e-3, token_s=20e-3, key_s=1e-9, pair_s=0.0)
    assert plan_at_rate(table(rows), slow, None, last).num_drafts_B.tolist() == [0] * 4


@given(
    st.lists(
        st.builds(Option, st.integers(1, 30_000), SHARES, st.integers(0, MOST_DRAFTS), KEYS),
        min_size=2,
        max_size=8,
    ),
    st.builds(WorkCost, st.floats(1e-3, 0.1), COSTS, COSTS, COSTS),
)
def test_a_late_plan_for_unchanged_options_is_the_best_one(given_options: list[Option], cost: WorkCost) -> None:
    """Some costs are 0, as learnt ones may be. Each sequence has two options."""
    pairs = list(zip(given_options[::2], given_options[1::2], strict=False))
    options = table([[first, replace(second, context=first.context)] for first, second in pairs])
    best = plan_round(options, cost)
    late = plan_at_rate(options, cost, None, best)
    assert late.rate == pytest.approx(best.rate, rel=1e-6)
    assert (late.num_drafts_B <= options.most_drafts_BK.max(1)).all()


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.82, 1.0])
@pytest.mark.parametrize("num_drafts", [0, 1, 4, 8])
def test_tokens_of_a_round_follow_the_formula(acceptance: float, num_drafts: int) -> None:
    """(1 - a^(g + 1)) / (1 - a), Leviathan et al., equation 1; and by simulation."""
    expected = num_drafts + 1 if acceptance == 1 else (1 - acceptance ** (num_drafts + 1)) / (1 - acceptance)
    assert expected_tokens(acceptance, num_drafts) == pytest.approx(expected)
    chance, total, num_rounds = random.Random(3), 0, 4000
    for _ in range(num_rounds):
        accepted = itertools.takewhile(lambda _: chance.random() < acceptance, range(num_drafts))
        total += 1 + len(list(accepted))
    assert total / num_rounds == pytest.approx(expected, abs=4 * (num_drafts + 1) / num_rounds**0.5)


def test_drafts_must_gain_more_than_a_step_that_launches_its_kernels_takes_longer() -> None:
    """Without drafts, the step replays a graph and is shorter by a fixed time."""
    rows = [[Option(1000, 0.9, 4, 0)]] * 4
    launched, plain_s = plan_round(table(rows), COST), COST.plain_s(4, 1000)
    assert launched.num_drafts_B.all()
    gained = launched.num_tokens / 4
    for is_worthwhile, factor in ((True, 1.05), (False, 0.95)):
        replayed_s = factor * launched.verify_s / gained
        replayed = replace(COST, step_s=COST.step_s - (plain_s - replayed_s))
        for found in (
            plan_round(table(rows), COST, None, replayed),
            plan_at_rate(table(rows), COST, None, launched, replayed),
        ):
            assert bool(found.num_drafts_B.any()) == is_worthwhile
            expected_s = launched.verify_s if is_worthwhile else replayed_s
            assert found.verify_s == pytest.approx(expected_s, rel=0.01)
