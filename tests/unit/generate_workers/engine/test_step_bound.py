"""Times of steps, learnt from steps, and the prefill that fits beside rows that decode."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.planning.step_cost import StepCost
from baton.planning.work_cost import StepWork, WorkCost
from baton.types import SlotId, TokenRange
from generate_workers.engine.chunked_prefill import ChunkedPrefillPolicy
from generate_workers.engine.scheduling_policy import SchedulingPolicy, StepPlan
from generate_workers.engine.step_bound import Decoding, PrefillWork, StepBound
from tests.support.engines.batches import Batch

BASE_S, ROW_S, TOKEN_S, RATE_S = 8e-3, 5e-4, 2e-6, 1e-3
WORK = PrefillWork(pair_work=1e-3)
START = WorkCost(2 * BASE_S, 2 * ROW_S, 2 * TOKEN_S, 2 * TOKEN_S)
"""Costs with which an estimate starts. They are higher than those of the engine."""


def assumed() -> StepCost:
    cost = StepCost(START)
    cost.prefill_s = 10 * RATE_S
    return cost


def step_s(decoding: Decoding, work: float) -> float:
    """An engine that keeps to the model."""
    decode_s = BASE_S + decoding.num_rows * ROW_S + decoding.num_tokens * TOKEN_S if decoding.num_rows else 0.0
    return decode_s + work * RATE_S


def taught(max_stretch: float = 1.5, budget_s: float = 0.0) -> StepBound:
    """Has seen decoding of some sizes, and prefill alone until its rate was known."""
    bound = StepBound(assumed(), max_stretch, budget_s)
    for num_rows, context in ((1, 100), (2, 900), (4, 300), (8, 500), (8, 1500)):
        decoding = Decoding(num_rows, num_rows * context)
        bound.observe(decoding, 0, step_s(decoding, 0))
    bound.observe(Decoding(0, 0), 256, step_s(Decoding(0, 0), 256))
    return bound


def test_predictions_begin_with_the_costs_that_are_given() -> None:
    bound, decoding = StepBound(assumed(), 1.5), Decoding(3, 300)
    decode_s = START.seconds(decoding.work)
    assert bound.expected_s(decoding, 10) == pytest.approx(decode_s + 100 * RATE_S)
    assert bound.max_work(decoding) == pytest.approx(0.5 * decode_s / (10 * RATE_S))
    assert bound.max_work(Decoding(0, 0)) == math.inf


def test_decoding_is_known_for_sizes_that_were_not_seen() -> None:
    unseen = Decoding(6, 6 * 800)
    assert taught().decode_s(unseen) == pytest.approx(step_s(unseen, 0))


def test_prefill_beside_rows_is_bounded_by_their_time() -> None:
    bound, decoding = taught(), Decoding(8, 4000)
    assert bound.max_work(decoding) == pytest.approx(0.5 * step_s(decoding, 0) / RATE_S)
    assert taught(1.0).max_work(decoding) == 0


def test_a_step_may_take_some_seconds_whatever_decoding_takes() -> None:
    decoding = Decoding(8, 4000)
    decode_s = step_s(decoding, 0)
    assert taught(1.5, 4 * decode_s).max_work(decoding) == pytest.approx(3 * decode_s / RATE_S)
    assert taught(1.5, 1.2 * decode_s).max_work(decoding) == pytest.approx(0.5 * decode_s / RATE_S)


def test_prompts_that_come_together_hold_no_stream_for_longer_than_the_budget() -> None:
    batch = Batch(ChunkedPrefillPolicy(1024, taught(budget_s=0.05), WORK))
    batch.join(SlotId(0), num_cached=100, num_known=101, num_output=2)
    for slot in range(1, 17):
        batch.join(SlotId(slot), num_cached=0, num_known=205)
    plans = [batch.run(model_s) for _ in range(200)]
    assert max(model_s(plan) for plan in plans) < 1.01 * 0.05
    assert sum(plan.num_prefill_tokens for plan in plans) == 16 * 205


def started_together(num_prompts: int, num_tokens: int) -> Batch:
    """Prompts that wait beside two rows that have no more than their first token."""
    batch = Batch(ChunkedPrefillPolicy(512, taught(budget_s=1e-6), WORK))
    for slot in range(2):
        batch.join(SlotId(slot), num_cached=205, num_known=206, num_output=1)
    for slot in range(2, 2 + num_prompts):
        batch.join(SlotId(slot), num_cached=0, num_known=num_tokens)
    return batch


def test_prompts_that_come_before_a_stream_goes_on_are_one_step() -> None:
    batch = started_together(9, 205)
    assert batch.run(model_s).num_prefill_tokens == 9 * 205
    assert not batch.run(model_s).num_prefill_tokens


@pytest.mark.parametrize(("num_prompts", "num_tokens", "first"), [(10, 205, 2 * 205), (2, 513, 512)])
def test_too_many_or_too_long_prompts_are_bounded_by_tokens(num_prompts: int, num_tokens: int, first: int) -> None:
    batch = started_together(num_prompts, num_tokens)
    assert batch.run(model_s).num_prefill_tokens == first
    assert batch.run(model_s).num_prefill_tokens < 205, "streams go on now"


def test_without_a_budget_a_first_pause_is_bounded_as_others_are() -> None:
    starting, going = Decoding(2, 412, is_streaming=False), Decoding(2, 412)
    assert taught().max_work(starting) == taught().max_work(going) < math.inf


def test_the_rate_follows_the_engine() -> None:
    bound, decoding = taught(), Decoding(4, 1200)
    for _ in range(60):
        bound.observe(decoding, 10, step_s(decoding, 30))  # prefill has become three times as slow
    assert 10 * bound.cost.prefill_s == pytest.approx(30 * RATE_S, rel=0.05)


def test_decoding_is_measured_after_the_first_step_that_did_both() -> None:
    bound, decoding = StepBound(assumed(), 1.5), Decoding(4, 1200)
    assert not bound.is_to_decode_alone(decoding)
    bound.observe(decoding, 4, step_s(decoding, 4))
    assert bound.is_to_decode_alone(decoding)
    bound.observe(decoding, 0, step_s(decoding, 0))
    assert bound.decode_s(decoding) == pytest.approx(step_s(decoding, 0))
    assert not bound.is_to_decode_alone(decoding)


@pytest.mark.parametrize("budget_s", [0.0, 0.01, 1.0, math.inf])
def test_the_budget_means_one_of_two_presets(budget_s: float) -> None:
    """Without a budget, half a decode step of prefill; with one, two decode steps or the budget."""
    bound, decoding = StepBound.of(budget_s, taught().cost), Decoding(8, 4000)
    decode_s = step_s(decoding, 0)
    expected_s = {0.0: 0.5 * decode_s, 0.01: 2 * decode_s, 1.0: 1.0 - decode_s}.get(budget_s, math.inf)
    assert bound.max_work(decoding) * RATE_S == pytest.approx(expected_s)
    assert bound.may_burst(replace(decoding, is_streaming=False)) == (0 < budget_s < math.inf)


@given(start=st.integers(0, 8000), most=st.floats(0, 1e4), pair_work=st.floats(0, 0.1))
def test_what_fits_is_as_much_as_can_be(start: int, most: float, pair_work: float) -> None:
    work = PrefillWork(pair_work)
    num_tokens = work.num_fitting(start, most)
    assert work.of(TokenRange(start, start + num_tokens)) <= most * (1 + 1e-9)
    assert work.of(TokenRange(start, start + num_tokens + 1)) > most * (1 - 1e-9)


class Drafting(Batch):
    """A batch whose rows that decode have drafts, each made by a step over `num_keys` keys; none is accepted."""

    def __init__(self, scheduling_policy: SchedulingPolicy, num_keys: int) -> None:
        super().__init__(scheduling_policy)
        self.num_drafts = 0
        self._num_keys = num_keys

    def plan(self) -> StepPlan:
        plan, num = super().plan(), self.num_drafts
        rows, context = plan.decoding.num_rows, plan.decoding.num_tokens
        drafting = StepWork(num * rows, num * rows * self._num_keys, num * rows * self._num_keys, num)
        drafts = drafting + StepWork(num * rows, 0, num * context, 0)
        return replace(plan, decoding=replace(plan.decoding, drafts=drafts)) if rows else plan


def model_s(plan: StepPlan) -> float:
    """Seconds of the plan's step, if it keeps to the model."""
    return step_s(plan.decoding, plan.prefill_work)


@settings(max_examples=40)
@given(
    contexts=st.lists(st.integers(1, 3000), min_size=1, max_size=8),
    num_tokens=st.integers(2, 2000),
    stretch=st.floats(1.0, 3.0),
)
def test_no_row_waits_beyond_the_bound_but_for_a_few_tokens(
    contexts: list[int], num_tokens: int, stretch: float
) -> None:
    batch = Batch(ChunkedPrefillPolicy(512, StepBound(assumed(), stretch), WORK))
    for slot, context in enumerate(contexts):
        batch.join(SlotId(slot), num_cached=context, num_known=context + 1)
    for _ in range(3):
        batch.run(model_s)
    newcomer, start = SlotId(99), 0
    batch.join(newcomer, num_cached=0, num_known=num_tokens)
    turn = 0
    while num_tokens - start > 1:  # a last token alone is a row's that decodes
        plan = batch.run(model_s)
        if not plan.prefill_work:  # to learn
            assert turn % 32 == 0 and turn
            plan = batch.run(model_s)
        (chunk,) = (span.tokens for span in plan.spans if span.slot == newcomer)
        assert len(chunk) >= min(16, num_tokens - start)
        if turn > 20:  # the rate is known by then; before, chunks are small
            decode_s = step_s(plan.decoding, 0)
            least_s = WORK.of(TokenRange(start, min(start + 16, num_tokens))) * RATE_S
            took_s = step_s(plan.decoding, plan.prefill_work)
            assert took_s <= max(stretch * decode_s * 1.05, decode_s + least_s) + 1e-9
        start, turn = chunk.end, turn + 1


@pytest.mark.parametrize("row_s", [5e-4, 5e-3])
def test_prefill_that_never_ends_does_not_starve_beside_more_rows_than_ever_decoded_alone(row_s: float) -> None:
    def took_s(plan: StepPlan) -> float:
        return step_s(plan.decoding, plan.prefill_work) + plan.decoding.num_rows * (row_s - ROW_S)

    batch = Batch(ChunkedPrefillPolicy(512, StepBound(assumed(), 1.5), PrefillWork()))
    batch.join(SlotId(0), num_cached=0, num_known=100)
    for _ in range(10):
        batch.run(took_s)  # one row, alone
    for slot in range(1, 25):
        batch.join(SlotId(slot), num_cached=0, num_known=40)
    batch.join(SlotId(99), num_cached=0, num_known=100_000)
    plans = [batch.run(took_s) for _ in range(400)]
    assert all(before.prefill_work or after.prefill_work for before, after in itertools.pairwise(plans))
    mixed = [plan for plan in plans[200:] if plan.prefill_work]
    assert len(mixed) > 0.95 * 200
    for plan in mixed:
        assert plan.decoding.num_rows == 25
        decode_s = took_s(replace(plan, prefill_work=0.0))
        assert 1.3 * decode_s < took_s(plan) < 1.6 * decode_s


def test_beside_rounds_of_drafts_prefill_is_bounded_by_the_round() -> None:
    """Numbers of drafts change now and then, as they do where they are planned; so does what a round takes."""
    keys_of_drafts, cost = 256, WorkCost(BASE_S, ROW_S, TOKEN_S, 4e-7)
    bound, stretch = StepBound(assumed(), 1.5), 1.5
    batch = Drafting(ChunkedPrefillPolicy(512, bound, PrefillWork()), keys_of_drafts)

    def round_s(plan: StepPlan) -> float:
        decoding = plan.decoding
        return cost.seconds(StepWork.plain(decoding.num_rows, decoding.num_tokens)) + cost.seconds(decoding.drafts)

    def took_s(plan: StepPlan) -> float:
        return (round_s(plan) if plan.decoding.num_rows else 0.0) + plan.prefill_work * RATE_S

    for slot in range(6):
        batch.join(SlotId(slot), num_cached=2000, num_known=2001)
    for num_drafts in (0, 2, 4, 3):
        batch.num_drafts = num_drafts
        for _ in range(5):
            batch.run(took_s)
    batch.join(SlotId(99), num_cached=0, num_known=100_000)
    for num_drafts in (3, 0, 4, 1):
        batch.num_drafts = num_drafts
        plans = [batch.run(took_s) for _ in range(30)]
        mixed = [plan for plan in plans[10:] if plan.prefill_work]
        assert len(mixed) >= 19
        for plan in mixed:
            assert plan.decoding.drafts.num_steps == num_drafts
            assert 1.4 * round_s(plan) < took_s(plan) <= stretch * round_s(plan) * 1.03


def test_steps_of_a_draft_model_are_not_taken_for_steps_of_the_model() -> None:
    """Their predicted seconds are added, however many drafts the rounds had from which decoding was learnt."""
    bound, draft_step_s = StepBound(assumed(), 1.5), 0.2 * BASE_S
    for num_rows, context, num_drafts in ((1, 100, 0), (2, 900, 3), (4, 300, 5), (8, 500, 0), (8, 1500, 2)):
        decoding = Decoding(num_rows, num_rows * context, draft_s=num_drafts * draft_step_s)
        bound.observe(decoding, 0, step_s(decoding, 0) + decoding.draft_s)
    bound.observe(Decoding(0, 0), 256, step_s(Decoding(0, 0), 256))
    plain = Decoding(6, 6 * 800)
    assert bound.decode_s(plain) == pytest.approx(step_s(plain, 0))
    drafting = replace(plain, draft_s=8 * draft_step_s)
    assert bound.decode_s(drafting) == pytest.approx(step_s(plain, 0) + 8 * draft_step_s)
    latest_s = step_s(plain, 0) + 2 * draft_step_s  # the next round is expected to be as the latest
    assert bound.max_work(plain) == pytest.approx(0.5 * latest_s / RATE_S)


def test_without_rows_the_whole_budget_is_prefilled() -> None:
    batch = Batch(ChunkedPrefillPolicy(64, taught(), WORK))
    batch.join(SlotId(1), num_cached=0, num_known=200)
    assert batch.run(model_s).num_prefill_tokens == 64


def test_prefills_share_what_a_step_may_take() -> None:
    decoding = Decoding(1, 101)
    batch = Batch(ChunkedPrefillPolicy(512, taught(8.0), PrefillWork()))
    batch.join(SlotId(1), num_cached=100, num_known=101, num_output=2)
    batch.join(SlotId(2), num_cached=0, num_known=40)
    batch.join(SlotId(3), num_cached=0, num_known=500)
    plan = batch.plan()
    assert plan.decoding == decoding
    assert plan.num_prefill_tokens == int(7 * step_s(decoding, 0) / RATE_S)
    assert [len(span.tokens) for span in plan.spans] == [1, 40, plan.num_prefill_tokens - 40]
