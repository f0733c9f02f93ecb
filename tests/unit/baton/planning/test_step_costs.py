"""Costs of steps are learnt from those that ran: against costs that are known."""

import random

import pytest

from baton.planning.hardware import cpu_rank, derive_step
from baton.planning.model_shape import ModelShape
from baton.planning.step_costs import StepCosts
from baton.planning.work_cost import StepWork, WorkCost

SHAPE = ModelShape(num_layers=30, hidden=576, num_heads=9, num_kv_heads=3, head_dim=64, ffn=1536, vocab=49152)


def true_s(work: StepWork) -> float:
    steps, tokens, keys, pairs = work.columns
    return steps * 15e-3 + tokens * 0.5e-3 + keys * 1.2e-6 + pairs * 0.2e-6


def costs() -> StepCosts:
    return StepCosts(derive_step(SHAPE, cpu_rank(2, 2), weight_bytes=270e6))


def test_costs_begin_as_they_are_given() -> None:
    measured = WorkCost(1e-2, 2e-3, 3e-6, 4e-7)
    assert StepCosts(measured).cost == measured


def test_observed_steps_are_predicted() -> None:
    chance, learning = random.Random(1), costs()
    works = [
        StepWork(rows * (1 + drafts), rows * context, rows * (1 + drafts) * context)
        for rows in (1, 4, 16)
        for context in (200, 1000, 6000)
        for drafts in (0, 2, 4)
    ]
    works += [StepWork(3 * rows, 3 * rows * 256, 3 * rows * 256, 3) for rows in (1, 4, 16)]
    for work in works * 2:
        learning.observe(work, true_s(work) * chance.uniform(0.98, 1.02))
    for work in works:
        assert learning.cost.seconds(work) == pytest.approx(true_s(work), rel=0.1)


def test_pairs_cost_what_they_nominally_do_until_some_were_compared() -> None:
    learning = costs()
    extra = learning.cost.seconds(StepWork(4, 4000, 16000)) - learning.cost.seconds(StepWork(4, 4000, 4000))
    for context in (100, 1000, 3000):
        work = StepWork(4, 4 * context, 4 * context)
        learning.observe(work, true_s(work))
    after = learning.cost.seconds(StepWork(4, 4000, 16000)) - learning.cost.seconds(StepWork(4, 4000, 4000))
    assert after == pytest.approx(extra)


def test_old_steps_are_forgotten() -> None:
    learning = costs()
    for factor in (1, 3):
        for _ in range(20):
            for rows in (1, 2, 8):
                work = StepWork(rows, 1000 * rows, 1000 * rows)
                learning.observe(work, factor * true_s(work))
    work = StepWork(2, 2000, 2000)
    assert learning.cost.seconds(work) == pytest.approx(3 * true_s(work), rel=0.05)
