"""Continuous batching in plain integers: who runs what, and nobody waits for a prefill."""

from baton.ids import SlotId
from baton.types import TokenRange
from generate_workers.engine.batcher import Batcher, RowSpan

A, B, C = SlotId(1), SlotId(2), SlotId(3)


def run(batcher: Batcher) -> tuple[RowSpan, ...]:
    """One step as the engine does it: everything planned is run, and whoever samples gets a token."""
    plan = batcher.plan()
    batcher.ran(plan)
    for span in plan.spans:
        if span.samples:
            batcher.sampled(span.slot)
    return plan.spans


def test_an_empty_batch_has_nothing_to_run() -> None:
    assert not Batcher(8).plan()


def test_a_row_whose_kv_is_there_runs_one_token_a_step() -> None:
    batcher = Batcher(8)
    batcher.join(A, num_cached=10, num_known=11)
    assert [run(batcher) for _ in range(3)] == [
        (RowSpan(A, TokenRange(position, position + 1), samples=True),) for position in (10, 11, 12)
    ]


def test_a_prompt_is_run_in_chunks_and_samples_with_the_last() -> None:
    batcher = Batcher(4)
    batcher.join(A, num_cached=0, num_known=10)
    assert [run(batcher)[0] for _ in range(4)] == [
        RowSpan(A, TokenRange(0, 4), samples=False),
        RowSpan(A, TokenRange(4, 8), samples=False),
        RowSpan(A, TokenRange(8, 10), samples=True),
        RowSpan(A, TokenRange(10, 11), samples=True),
    ]


def test_decoding_rows_run_in_every_step_beside_a_prefill() -> None:
    batcher = Batcher(4)
    batcher.join(A, num_cached=0, num_known=100)
    batcher.join(B, num_cached=5, num_known=6)
    for step in range(10):
        assert RowSpan(B, TokenRange(5 + step, 6 + step), samples=True) in run(batcher)


def test_prefills_share_one_budget_first_come_first_served() -> None:
    batcher = Batcher(6)
    batcher.join(A, num_cached=0, num_known=8)
    batcher.join(B, num_cached=0, num_known=5)
    assert [[(span.slot, len(span.tokens)) for span in run(batcher)] for _ in range(3)] == [
        [(A, 6)],
        [(A, 2), (B, 4)],
        [(A, 1), (B, 1)],
    ]


def test_the_plan_counts_decode_rows_and_prefill_tokens() -> None:
    batcher = Batcher(6)
    batcher.join(A, num_cached=0, num_known=8)
    batcher.join(B, num_cached=5, num_known=6)
    batcher.join(C, num_cached=7, num_known=8)
    plan = batcher.plan()
    assert (plan.num_decode_rows, plan.num_prefill_tokens) == (2, 6)


def test_planning_changes_nothing() -> None:
    batcher = Batcher(6)
    batcher.join(A, num_cached=0, num_known=8)
    assert batcher.plan() == batcher.plan()


def test_a_row_that_leaves_does_not_disturb_the_others() -> None:
    batcher = Batcher(4)
    batcher.join(A, num_cached=0, num_known=8)
    batcher.join(B, num_cached=5, num_known=6)
    run(batcher)
    batcher.leave(A)
    assert run(batcher) == (RowSpan(B, TokenRange(6, 7), samples=True),)
    assert len(batcher) == 1


def test_a_row_without_a_known_token_to_run_waits() -> None:
    batcher = Batcher(4)
    batcher.join(A, num_cached=5, num_known=5)
    assert not batcher.plan()
    batcher.sampled(A)
    assert batcher.plan().spans == (RowSpan(A, TokenRange(5, 6), samples=True),)


def test_every_row_gets_its_turn_whatever_the_budget() -> None:
    batcher = Batcher(1)
    for ticket in (A, B, C):
        batcher.join(ticket, num_cached=0, num_known=7)
    first_sampled: dict[SlotId, int] = {}
    for step in range(30):
        for span in run(batcher):
            if span.samples:
                first_sampled.setdefault(span.slot, step)
    assert set(first_sampled) == {A, B, C}
