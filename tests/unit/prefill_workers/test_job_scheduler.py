"""Who is due first goes first, of those that can; what was served is remembered."""

import random
from typing import cast

from baton.types import Epoch, JobId, Rank, RequestId, TokenRange
from prefill_workers.chain import ChainJob
from prefill_workers.job import Job
from prefill_workers.job_scheduler import JobScheduler
from tests.support.engines.chain_simulation import SimulatedJob


def job(number: int, due_s: float, *, num_layers: int = 1, num_received: int = 1) -> SimulatedJob:
    described = Job(JobId(number), Epoch(1), RequestId("r"), 1, (Rank(0),), (TokenRange(0, 1),), (1,), due_s=due_s)
    return SimulatedJob(described, 1.0, num_layers, num_received)


def job_scheduler_of(*jobs: SimulatedJob) -> JobScheduler:
    job_scheduler = JobScheduler()
    for each in jobs:
        job_scheduler.add(cast(ChainJob, each))
    return job_scheduler


def order_of(job_scheduler: JobScheduler) -> list[int]:
    """Gives turns until nobody can use one; the numbers of those that had them."""
    order: list[int] = []
    while (found := job_scheduler.next_runnable()) is not None:
        cast(SimulatedJob, found).num_done += 1
        order.append(found.job.number)
        job_scheduler.take_over()
    return order


def test_the_job_due_first_goes_first_of_two_due_at_once_the_lower_number() -> None:
    assert order_of(job_scheduler_of(job(1, 3.0), job(4, 2.0), job(3, 2.0), job(2, 5.0))) == [3, 4, 1, 2]


def test_jobs_of_unknown_dues_go_by_number() -> None:
    jobs = [job(number, 0.0) for number in range(10)]
    random.Random(0).shuffle(jobs)
    assert order_of(job_scheduler_of(*jobs)) == list(range(10))


def test_a_job_due_earlier_runs_between_two_layers_of_another() -> None:
    job_scheduler = job_scheduler_of(job(1, 9.0, num_layers=3, num_received=3))
    first = job_scheduler.next_runnable()
    assert first is not None
    cast(SimulatedJob, first).num_done += 1
    job_scheduler.add(cast(ChainJob, job(2, 5.0)))
    assert order_of(job_scheduler) == [2, 1, 1]


def test_a_job_that_waits_yields_its_turns() -> None:
    waiting = job(1, 1.0, num_received=0)
    job_scheduler = job_scheduler_of(waiting, job(2, 2.0))
    assert order_of(job_scheduler) == [2]
    waiting.num_received = 1
    assert order_of(job_scheduler) == [1]


def test_buried_number_is_remembered() -> None:
    job_scheduler = JobScheduler()
    job_scheduler.bury(JobId(5))
    assert job_scheduler.is_buried(JobId(5))
    assert not job_scheduler.is_buried(JobId(4))


def test_memory_of_numbers_is_bounded_and_forgets_the_oldest() -> None:
    job_scheduler = JobScheduler()
    for number in range(5000):
        job_scheduler.bury(JobId(number))
    assert job_scheduler.is_buried(JobId(4999))
    assert job_scheduler.is_buried(JobId(4999 - 4095))
    assert not job_scheduler.is_buried(JobId(0))


def test_empty_sequencer_has_nobody_to_serve() -> None:
    job_scheduler = JobScheduler()
    assert job_scheduler.next_runnable() is None
    assert job_scheduler.take_over() == []
    assert len(job_scheduler) == 0
