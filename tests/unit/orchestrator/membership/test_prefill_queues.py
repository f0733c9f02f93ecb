"""The book follows the ranks: who is due first is worked on first, and what has ended is gone."""

from baton.types import JobId, Rank
from orchestrator.membership.prefill_queues import Pending, PrefillQueues

A, B, C = JobId(1), JobId(2), JobId(3)
R0, R1 = Rank(0), Rank(1)
LIFE = "a group's incarnation"


def job(due_s: float, **left_s: float) -> Pending:
    """Due then, with so many seconds on ranks r0 and r1."""
    return Pending(due_s, 1e9, {Rank(int(name[1:])): seconds for name, seconds in left_s.items()})


def lefts(prefill_queues: PrefillQueues, now_s: float) -> list[dict[Rank, float]]:
    return [dict(each.left_s) for each in prefill_queues.pending(LIFE, now_s)]


def test_jobs_are_in_the_order_of_their_dues_then_of_their_numbers() -> None:
    prefill_queues = PrefillQueues()
    for number, due_s in ((B, 5.0), (C, 4.0), (A, 5.0)):
        prefill_queues.add(LIFE, number, job(due_s, r0=float(number)), 0.0)
    assert [each.left_s for each in prefill_queues.pending(LIFE, 0.0)] == [{R0: 3.0}, {R0: 1.0}, {R0: 2.0}]


def test_a_rank_spends_its_time_on_the_job_due_first() -> None:
    prefill_queues = PrefillQueues()
    prefill_queues.add(LIFE, A, job(9.0, r0=3.0, r1=3.0), 0.0)
    prefill_queues.add(LIFE, B, job(5.0, r0=2.0), 0.0)
    assert lefts(prefill_queues, 1.0) == [{R0: 1.0}, {R0: 3.0, R1: 2.0}]
    assert lefts(prefill_queues, 2.5) == [{R0: 0.0}, {R0: 2.5, R1: 0.5}]


def test_what_was_done_before_a_job_came_is_not_counted_for_it() -> None:
    prefill_queues = PrefillQueues()
    prefill_queues.add(LIFE, A, job(1.0, r0=1.0), 0.0)
    prefill_queues.add(LIFE, B, job(2.0, r0=4.0), 3.0)
    assert lefts(prefill_queues, 4.0) == [{R0: 0.0}, {R0: 3.0}]


def test_work_of_a_job_that_has_ended_is_not_lost() -> None:
    prefill_queues = PrefillQueues()
    prefill_queues.add(LIFE, A, job(1.0, r0=1.0), 0.0)
    prefill_queues.add(LIFE, B, job(2.0, r0=4.0), 0.0)
    prefill_queues.release(LIFE, A, [R0], 1.0)
    assert lefts(prefill_queues, 1.0) == [{R0: 4.0}]


def test_a_job_goes_with_its_last_rank() -> None:
    prefill_queues = PrefillQueues()
    prefill_queues.add(LIFE, A, job(1.0, r0=1.0, r1=2.0), 0.0)
    prefill_queues.release(LIFE, A, [R0], 0.5)
    assert lefts(prefill_queues, 0.5) == [{R1: 1.5}]
    prefill_queues.release(LIFE, A, [R0, R1], 0.5)
    assert len(prefill_queues) == 0
    prefill_queues.release(LIFE, A, [R1], 0.5)


def test_a_clock_that_is_set_back_undoes_nothing() -> None:
    prefill_queues = PrefillQueues()
    prefill_queues.add(LIFE, A, job(1.0, r0=4.0), 10.0)
    assert lefts(prefill_queues, 11.0) == [{R0: 3.0}]
    assert lefts(prefill_queues, 5.0) == [{R0: 3.0}]


def test_each_life_of_a_group_has_its_own_book() -> None:
    prefill_queues = PrefillQueues()
    prefill_queues.add("first", A, job(1.0, r0=1.0), 0.0)
    assert prefill_queues.pending("second", 0.0) == ()
    prefill_queues.release("second", A, [R0], 0.0)
    assert len(prefill_queues) == len(prefill_queues.pending("first", 0.0)) == 1
    prefill_queues.release("first", A, [R0], 0.0)
    assert len(prefill_queues) == 0
