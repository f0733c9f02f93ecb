"""Continuous batching in plain integers: who runs what, and nobody waits for a prefill."""

from baton.types import SlotId, TokenRange
from generate_workers.engine.scheduling_policy import RowSpan
from tests.support.engines.batches import Batch, by_tokens

A, B, C = SlotId(1), SlotId(2), SlotId(3)


def test_an_empty_batch_has_nothing_to_run() -> None:
    assert not Batch(by_tokens(8)).plan()


def test_a_row_whose_kv_is_there_runs_one_token_a_step() -> None:
    batch = Batch(by_tokens(8))
    batch.join(A, num_cached=10, num_known=11)
    assert [batch.run().spans for _ in range(3)] == [
        (RowSpan(A, TokenRange(position, position + 1), samples=True),) for position in (10, 11, 12)
    ]


def test_a_prompt_is_run_in_chunks_and_samples_with_the_last() -> None:
    batch = Batch(by_tokens(4))
    batch.join(A, num_cached=0, num_known=10)
    assert [batch.run().spans[0] for _ in range(4)] == [
        RowSpan(A, TokenRange(0, 4), samples=False),
        RowSpan(A, TokenRange(4, 8), samples=False),
        RowSpan(A, TokenRange(8, 10), samples=True),
        RowSpan(A, TokenRange(10, 11), samples=True),
    ]


def test_decoding_rows_run_in_every_step_beside_a_prefill() -> None:
    batch = Batch(by_tokens(4))
    batch.join(A, num_cached=0, num_known=100)
    batch.join(B, num_cached=5, num_known=6)
    for step in range(10):
        assert RowSpan(B, TokenRange(5 + step, 6 + step), samples=True) in batch.run().spans


def test_prefills_share_one_budget_first_come_first_served() -> None:
    batch = Batch(by_tokens(6))
    batch.join(A, num_cached=0, num_known=8)
    batch.join(B, num_cached=0, num_known=9)
    assert [[(span.slot, len(span.tokens)) for span in batch.run().spans] for _ in range(3)] == [
        [(A, 6)],
        [(A, 2), (B, 4)],
        [(A, 1), (B, 5)],
    ]


def test_a_prompt_is_cut_only_where_no_step_could_hold_it_whole() -> None:
    batch = Batch(by_tokens(6))
    batch.join(A, num_cached=0, num_known=4)
    batch.join(B, num_cached=0, num_known=5)
    batch.join(C, num_cached=0, num_known=2)
    assert [[(span.slot, len(span.tokens)) for span in batch.run().spans] for _ in range(2)] == [
        [(A, 4), (C, 2)],
        [(A, 1), (B, 5), (C, 1)],
    ]


def test_the_plan_counts_decode_rows_and_prefill_tokens() -> None:
    batch = Batch(by_tokens(6))
    batch.join(A, num_cached=0, num_known=8)
    batch.join(B, num_cached=5, num_known=6)
    batch.join(C, num_cached=7, num_known=8)
    plan = batch.plan()
    assert (plan.decoding.num_rows, plan.num_prefill_tokens) == (2, 6)


def test_planning_changes_nothing() -> None:
    batch = Batch(by_tokens(6))
    batch.join(A, num_cached=0, num_known=8)
    assert batch.plan() == batch.plan()


def test_a_row_that_leaves_does_not_disturb_the_others() -> None:
    batch = Batch(by_tokens(4))
    batch.join(A, num_cached=0, num_known=8)
    batch.join(B, num_cached=5, num_known=6)
    batch.run()
    del batch.rows[A]
    assert batch.run().spans == (RowSpan(B, TokenRange(6, 7), samples=True),)
    assert list(batch.rows) == [B]


def test_a_row_without_a_known_token_to_run_waits() -> None:
    batch = Batch(by_tokens(4))
    batch.join(A, num_cached=5, num_known=5)
    assert not batch.plan()
    batch.rows[A].num_known += 1
    assert batch.plan().spans == (RowSpan(A, TokenRange(5, 6), samples=True),)


def test_every_row_gets_its_turn_whatever_the_budget() -> None:
    batch = Batch(by_tokens(1))
    for stream_id in (A, B, C):
        batch.join(stream_id, num_cached=0, num_known=7)
    first_sampled: dict[SlotId, int] = {}
    for step in range(30):
        for span in batch.run().spans:
            if span.samples:
                first_sampled.setdefault(span.slot, step)
    assert set(first_sampled) == {A, B, C}
