"""A rank waits for jobs whose calls have come, however slowly it submits them."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from baton.errors import JobAbortedError, LinkBrokenError
from baton.modeling.forward.decoder import Decoder
from baton.types import Epoch, JobId, Rank
from prefill_workers.links import LinkHeader, LinkStatus
from tests.support.engines.chains import WAIT_S, KeepingSender, reference_token, until
from tests.support.engines.middle_ranks import Middle, middle_rank
from tests.support.manual_clock import ManualClock
from tests.support.models.tiny_models import random_decoder

EPOCH = Epoch(1)
UNKNOWN = 70


@pytest.fixture
def decoder() -> Decoder:
    return random_decoder(num_layers=3)


@pytest.fixture
def middle(decoder: Decoder) -> Iterator[Middle]:
    """Gives a job that nobody announces 0.2 s, and a silent peer any time."""
    with middle_rank(decoder, clock=ManualClock(), floor_s=0.4) as made:
        yield made


def announced(middle: Middle) -> set[JobId]:
    with middle.engine._changed:
        session = middle.engine._session
        assert session is not None
        return set(session._announced)


def wait_bounds(middle: Middle, count: int = 2) -> None:
    """For as long as jobs are waited for that nobody announces."""
    header = LinkHeader(EPOCH, JobId(UNKNOWN), 0, middle.job().chunks[0], LinkStatus.DATA, 1)
    first = len(middle.recorders[2].sent_messages)
    for number in range(first, first + count):
        middle.links[2].send(Rank(1), replace(header, job=JobId(UNKNOWN + number)), memoryview(b"x"))
    middle.recorders[2].wait_sent(first + count)


def test_message_of_an_announced_job_waits_as_long_as_that_is_prepared(middle: Middle) -> None:
    with middle.engine.expect(EPOCH, JobId(1)):
        middle.send_all_rows()
        wait_bounds(middle)
        assert not middle.recorders[0].sent_messages
        kv_sender, job = KeepingSender(), middle.job(num_ranks=2)
        middle.engine.submit(job, kv_sender).result(WAIT_S)
        assert kv_sender.finishes == [(reference_token(middle.decoder, job),)]
    assert not announced(middle)


def test_job_that_was_announced_and_never_came_is_refused_in_time(middle: Middle) -> None:
    with middle.engine.expect(EPOCH, JobId(1)), middle.engine.expect(EPOCH, JobId(1)):
        middle.send_rows(0)
        wait_bounds(middle)
    assert not announced(middle)
    middle.recorders[0].wait_sent(1)
    with pytest.raises(JobAbortedError, match="no longer served by rank 1"):
        middle.engine.submit(middle.job(), KeepingSender())


def test_job_stays_announced_until_the_last_of_its_calls_is_over(middle: Middle) -> None:
    with middle.engine.expect(EPOCH, JobId(1)):
        with pytest.raises(ValueError, match="a call that fails"), middle.engine.expect(EPOCH, JobId(1)):
            raise ValueError("a call that fails")
        assert announced(middle) == {1}
    assert not announced(middle)


def test_job_of_another_epoch_is_not_announced(middle: Middle) -> None:
    with middle.engine.expect(Epoch(2), JobId(1)):
        assert not announced(middle)


def test_no_rank_takes_a_job_s_preparation_for_silence(decoder: Decoder) -> None:
    """Neither the ranks before and behind, nor this one, whose link from rank 0 keeps still."""
    clock = ManualClock()
    with middle_rank(decoder, clock=clock, floor_s=0.4) as middle:
        waiting = middle.engine.submit(middle.job(2, num_ranks=2), KeepingSender())
        with middle.engine.expect(EPOCH, JobId(1)):
            middle.send_all_rows(1)
            middle.send_all_rows(2)
            middle.pass_limits(clock, 0.4, ranks=[0, 2])
            for recorder in middle.recorders.values():
                told = {(header.status, header.job) for _, header, _ in recorder.received_messages}
                assert told == {(LinkStatus.ALIVE, 1)}
            assert middle.engine.status().epoch_error == ""
            middle.engine.submit(middle.job(1, num_ranks=2), KeepingSender()).result(WAIT_S)
        assert waiting.result(WAIT_S).rank == 1


def test_rank_with_nothing_announced_says_nothing(middle: Middle) -> None:
    with middle.engine.expect(EPOCH, JobId(1)):
        middle.recorders[2].wait_received(1)
        middle.send_all_rows()
        middle.engine.submit(middle.job(num_ranks=2), KeepingSender()).result(WAIT_S)
        num_received = len(middle.recorders[0].received_messages)
        wait_bounds(middle, 3)
        assert len(middle.recorders[0].received_messages) <= num_received + 1  # one was under way


def test_sign_of_life_is_not_passed_back_to_the_rank_that_gave_it(decoder: Decoder) -> None:
    with middle_rank(decoder) as middle:
        middle.engine.submit(middle.job(), KeepingSender())
        middle.recorders[2].wait_received(1)  # its own rows of layer 0
        middle.links[2].send(Rank(1), LinkHeader.bare(EPOCH, JobId(1), LinkStatus.ALIVE), None)
        middle.recorders[2].wait_sent(1)
        middle.send_bare(LinkStatus.ABORT)
        middle.recorders[2].wait_received(2)
        assert middle.recorders[2].statuses == [LinkStatus.DATA, LinkStatus.ABORT]


def test_message_of_an_announced_job_does_not_outlive_the_epoch(middle: Middle) -> None:
    with middle.engine.expect(EPOCH, JobId(1)):
        middle.send_rows(0)
        until(lambda: middle.engine.status().progress == 1)  # it has come, and waits
        middle.engine.end_epoch(LinkBrokenError("the cable is cut"))
        middle.links[0].close()
        assert middle.links[0].wait_closed(WAIT_S)
