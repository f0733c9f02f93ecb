"""Costs of steps are learnt from those that ran: against simulated engines whose costs are known, and change."""

import math
import random
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.planning.hardware import cpu_rank, derive_step
from baton.planning.model_shape import ModelShape
from baton.planning.step_cost import StepCost, StepKind
from baton.planning.work_cost import StepWork, WorkCost
from tests.support.kernels.os_memory import without_collections

SHAPE = ModelShape(num_layers=30, hidden=576, num_heads=9, num_kv_heads=3, head_dim=64, ffn=1536, vocab=49152)
NOMINAL = derive_step(SHAPE, cpu_rank(2, 2), weight_bytes=270e6)
TRUE = WorkCost(15e-3, 0.5e-3, 1.2e-6, 0.2e-6)
RATE_S = 0.8e-3
LAUNCH_S = 16e-3
PLAIN = StepWork.plain(8, 8000)
VERIFYING = StepWork(8 * 4, 8000, 4 * 8000)
DRAFTING = StepWork(8 * 3, 8 * 3 * 256, 8 * 3 * 256, 3)


def costs() -> StepCost:
    return StepCost(NOMINAL)


def at_rate(cost: StepCost, prefill_s: float) -> StepCost:
    """The costs, with another time of a unit of prefill work."""
    cost.prefill_s = prefill_s
    return cost


class Simulated:
    """An engine whose steps take the true costs, times a factor and some noise. It runs a cycle of steps."""

    def __init__(self, cost: StepCost, seed: int = 1) -> None:
        self.cost, self.factor = cost, 1.0
        self._chance = random.Random(seed)

    def true_s(self, work: StepWork, prefill_work: float = 0.0) -> float:
        return self.factor * (TRUE.seconds(work) + prefill_work * RATE_S)

    def predicted_s(self, work: StepWork, prefill_work: float = 0.0) -> float:
        return self.cost.plain.seconds(work) + prefill_work * self.cost.prefill_s

    def run(self, work: StepWork, prefill_work: float = 0.0, stall: float = 1.0) -> None:
        noise = self._chance.uniform(0.95, 1.05)
        self.cost.observe(work, prefill_work, stall * noise * self.true_s(work, prefill_work))

    def grown(self, step: int) -> StepWork:
        """A batch whose contexts grow."""
        return StepWork.plain(8, 8000 + 8 * step)


def decode(engine: Simulated, step: int, stall: float = 1.0) -> None:
    engine.run(engine.grown(step), stall=stall)


def mix(engine: Simulated, step: int, stall: float = 1.0) -> None:
    """A prompt is prefilled in chunks, and one step in 33 only decodes, or one after it is found to be due."""
    engine.run(engine.grown(step), 0.0 if step % 33 == 0 or engine.cost.is_decode_due else 20.0, stall)


def draft(engine: Simulated, step: int, stall: float = 1.0) -> None:
    engine.run(DRAFTING, stall=stall)
    engine.run(VERIFYING, stall=stall)


KINDS = pytest.mark.parametrize(
    ("take", "work", "prefill_work"),
    [(decode, PLAIN, 0.0), (mix, PLAIN, 20.0), (draft, DRAFTING + VERIFYING, 0.0)],
    ids=["decode", "mixed", "drafts"],
)
Take = Callable[..., None]


def warmed(take: Take) -> Simulated:
    """Has run batches of several sizes, and then many steps of one kind."""
    engine = Simulated(costs())
    for rows in (1, 2, 4, 16):
        for context in (100, 1000, 3000):
            engine.run(StepWork.plain(rows, rows * context))
            engine.run(StepWork(3 * rows, rows * context, 3 * rows * context))
    for _ in range(5):
        engine.run(StepWork(0, 0, 0, 0), 256.0)
    for step in range(200):
        take(engine, step)
    return engine


@KINDS
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_predictions_follow_within_a_few_steps(take: Take, work: StepWork, prefill_work: float, factor: float) -> None:
    engine = warmed(take)
    assert engine.predicted_s(work, prefill_work) == pytest.approx(engine.true_s(work, prefill_work), rel=0.08)
    for turn in range(3):
        engine.factor *= factor
        for step in range(12):
            take(engine, 201 + 12 * turn + step)
        assert engine.predicted_s(work, prefill_work) == pytest.approx(engine.true_s(work, prefill_work), rel=0.12)


@KINDS
def test_rare_stalls_hardly_move_predictions(take: Take, work: StepWork, prefill_work: float) -> None:
    engine = warmed(take)
    for step in range(1, 200):
        before_s = engine.predicted_s(work, prefill_work)
        take(engine, 200 + step, 20.0 if step % 40 == 7 else 1.0)
        assert engine.predicted_s(work, prefill_work) == pytest.approx(before_s, rel=0.25)
        assert engine.predicted_s(work, prefill_work) == pytest.approx(engine.true_s(work, prefill_work), rel=0.25)


def test_an_engine_that_has_become_much_slower_is_not_taken_for_one_that_stalls() -> None:
    engine = warmed(decode)
    engine.factor = 10.0
    for step in range(12):
        decode(engine, 200 + step)
    assert engine.predicted_s(PLAIN) == pytest.approx(engine.true_s(PLAIN), rel=0.12)


def test_costs_begin_as_they_are_given() -> None:
    cost = StepCost(TRUE)
    assert (cost.plain, cost.verifying, cost.drafting, cost.prefill_s) == (TRUE, TRUE, TRUE, TRUE.token_s)
    assert cost.learnt.num_steps == 0


def test_observed_steps_are_predicted() -> None:
    engine = Simulated(costs())
    works = [
        StepWork(rows * (1 + drafts), rows * context, rows * (1 + drafts) * context)
        for rows in (1, 4, 16)
        for context in (200, 1000, 6000)
        for drafts in (0, 2, 4)
    ]
    works += [StepWork(3 * rows, 3 * rows * 256, 3 * rows * 256, 3) for rows in (1, 4, 16)]
    for work in works * 2:
        engine.run(work)
    for work in works:
        assert engine.predicted_s(work) == pytest.approx(TRUE.seconds(work), rel=0.1)


def test_what_one_kind_of_step_does_not_tell_is_as_the_start_value_says() -> None:
    """An engine that is twice as slow as its start value, and has run one sequence: more sequences and drafts are
    expected to cost twice as much, too."""
    cost = StepCost(TRUE)
    for _ in range(20):
        cost.observe(StepWork.plain(1, 1000), 0.0, 2 * TRUE.seconds(StepWork.plain(1, 1000)))
    for work in (StepWork.plain(1, 1000), StepWork.plain(16, 16000), VERIFYING):
        assert cost.plain.seconds(work) == pytest.approx(2 * TRUE.seconds(work), rel=0.02)


def test_the_first_prompts_replace_a_rate_that_is_far_off() -> None:
    cost = at_rate(StepCost(TRUE), RATE_S / 100)
    cost.observe(StepWork(0, 0, 0, 0), 64.0, 64 * RATE_S)
    assert cost.prefill_s == pytest.approx(RATE_S)


def test_steps_that_replay_a_graph_have_costs_of_their_own() -> None:
    cost = StepCost(TRUE, launch_s=3 * LAUNCH_S)
    launched = replace(TRUE, step_s=3 * LAUNCH_S)
    assert cost.plain == cost.verifying == cost.drafting == launched
    cost.replay_graphs()
    assert cost.plain == cost.verifying == cost.drafting == TRUE
    for _ in range(10):
        cost.observe(PLAIN, 0.0, 5e-3)
    assert cost.plain.seconds(PLAIN) == pytest.approx(5e-3)
    assert cost.verifying == cost.drafting == TRUE
    for _ in range(10):
        cost.observe(VERIFYING, 0.0, 0.1, StepKind.VERIFYING)
        cost.observe(PLAIN, 0.0, 0.3, StepKind.DRAFT)
    assert cost.verifying.seconds(VERIFYING) == pytest.approx(0.1)
    assert cost.drafting.seconds(PLAIN) == pytest.approx(0.3)
    assert cost.plain.seconds(PLAIN) == pytest.approx(5e-3)
    assert (cost.learnt.plain, cost.learnt.verifying, cost.learnt.num_steps) == (cost.plain, cost.verifying, 30)


@pytest.mark.parametrize("seed", range(4))
def test_times_of_batches_that_ran_long_ago_do_not_grow_with_each_change(seed: int) -> None:
    """The engine becomes slower or faster at every fourth step. Large batches ran only at first."""
    true, factor = WorkCost(1e-3, 2e-4, 1e-7, 0.0), 1.0
    chance, cost = random.Random(seed), StepCost(WorkCost(1e-4, 1e-5, 1e-8, 1e-9))
    for step in range(8000):
        factor = math.exp(chance.gauss(0.0, 0.7)) if step % 4 == 0 else factor
        num_rows = step + 1 if step < 50 else 1
        work = StepWork.plain(num_rows, 200 * num_rows)
        cost.observe(work, 0.0, factor * true.seconds(work))
    known, early = (cost.plain.plain_s(num, 200) / true.plain_s(num, 200) for num in (1, 16))
    assert 0.5 < early / known < 2


def test_short_prompts_do_not_raise_the_rate_where_launching_takes_the_time() -> None:
    cost = at_rate(StepCost(TRUE, launch_s=LAUNCH_S), RATE_S / 100)
    for _ in range(20):
        cost.observe(StepWork(0, 0, 0, 0), 20.0, LAUNCH_S)
    assert cost.prefill_s == RATE_S / 100


def test_a_step_in_which_a_kernel_was_compiled_teaches_nothing() -> None:
    num_compiled = 3
    cost = StepCost(TRUE, num_compiled=lambda: num_compiled)
    num_compiled = 4
    cost.observe(PLAIN, 0.0, 2.0)
    cost.observe(PLAIN, 0.0, 0.0)
    assert cost.learnt.num_steps == 0 and cost.plain == TRUE
    cost.observe(PLAIN, 0.0, 2.0)
    assert cost.plain.seconds(PLAIN) == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize("take", [decode, mix, draft])
def test_learning_is_cheap(take: Take) -> None:
    """On average over many steps, fits included. The bound is generous, because other processes run, too."""
    engine = warmed(take)
    with without_collections():
        before_s = time.thread_time()
        for step in range(800):
            take(engine, 200 + step)
        took_s = time.thread_time() - before_s
    assert took_s / 800 < 300e-6
