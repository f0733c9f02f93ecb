"""Who is due first goes first, of those that can; what was served is remembered."""

import random
from typing import cast

from baton.types import Epoch, JobId, Rank, RequestId, TokenRange
from prefill_workers.chain import ChainJob
from prefill_workers.job import Job
from prefill_workers.sequencer import Sequencer
from tests.support.engines.chain_simulation import SimulatedJob


def job(number: int, due_s: float, *, num_layers: int = 1, num_received: int = 1) -> SimulatedJob:
    described = Job(JobId(number), Epoch(1), RequestId("r"), 1, (Rank(0),), (TokenRange(0, 1),), (1,), due_s=due_s)
    return SimulatedJob(described, 1.0, num_layers, num_received)


def sequencer_of(*jobs: SimulatedJob) -> Sequencer:
    sequencer = Sequencer()
    for each in jobs:
        sequencer.add(cast(ChainJob, each))
    return sequencer


def order_of(sequencer: Sequencer) -> list[int]:
    """Gives turns until nobody can use one; the numbers of those that had them."""
    order: list[int] = []
    while (found := sequencer.next_runnable()) is not None:
        cast(SimulatedJob, found).num_done += 1
        order.append(found.job.number)
        sequencer.take_over()
    return order


def test_the_job_due_first_goes_first_of_two_due_at_once_the_lower_number() -> None:
    assert order_of(sequencer_of(job(1, 3.0), job(4, 2.0), job(3, 2.0), job(2, 5.0))) == [3, 4, 1, 2]


def test_jobs_of_unknown_dues_go_by_number() -> None:
    jobs = [job(number, 0.0) for number in range(10)]
    random.Random(0).shuffle(jobs)
    assert order_of(sequencer_of(*jobs)) == list(range(10))


def test_a_job_due_earlier_runs_between_two_layers_of_another() -> None:
    sequencer = sequencer_of(job(1, 9.0, num_layers=3, num_received=3))
    first = sequencer.next_runnable()
    assert first is not None
    cast(SimulatedJob, first).num_done += 1
    sequencer.add(cast(ChainJob, job(2, 5.0)))
    assert order_of(sequencer) == [2, 1, 1]


def test_a_job_that_waits_yields_its_turns() -> None:
    waiting = job(1, 1.0, num_received=0)
    sequencer = sequencer_of(waiting, job(2, 2.0))
    assert order_of(sequencer) == [2]
    waiting.num_received = 1
    assert order_of(sequencer) == [1]


def test_buried_number_is_remembered() -> None:
    sequencer = Sequencer()
    sequencer.bury(JobId(5))
    assert sequencer.is_buried(JobId(5))
    assert not sequencer.is_buried(JobId(4))


def test_memory_of_numbers_is_bounded_and_forgets_the_oldest() -> None:
    sequencer = Sequencer()
    for number in range(5000):
        sequencer.bury(JobId(number))
    assert sequencer.is_buried(JobId(4999))
    assert sequencer.is_buried(JobId(4999 - 4095))
    assert not sequencer.is_buried(JobId(0))


def test_empty_sequencer_has_nobody_to_serve() -> None:
    sequencer = Sequencer()
    assert sequencer.next_runnable() is None
    assert sequencer.take_over() == []
    assert len(sequencer) == 0
