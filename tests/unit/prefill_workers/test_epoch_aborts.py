"""A rank that is told of a job's abort ends the job, and passes the abort on."""

import pytest

from baton.errors import JobAbortedError, RequestCancelledError
from baton.modeling.forward.decoder import Decoder
from baton.types import Epoch, JobId, Rank
from prefill_workers.links import LinkHeader, LinkStatus
from tests.support.engines.chains import WAIT_S, KeepingSender, until
from tests.support.engines.middle_ranks import middle_rank
from tests.support.models.tiny_models import random_decoder


@pytest.fixture
def decoder() -> Decoder:
    return random_decoder(num_layers=3)


def test_abort_fails_the_job_and_is_passed_on(decoder: Decoder) -> None:
    with middle_rank(decoder) as middle:
        kv_sender = KeepingSender()
        future = middle.engine.submit(middle.job(), kv_sender)
        middle.send_rows(0)
        middle.recorders[2].wait_received(3)  # layer 0, and its own rows of layer 1
        middle.send_bare(LinkStatus.ABORT)
        with pytest.raises(JobAbortedError, match="rank 0 gave job 1 up"):
            future.result(WAIT_S)
        middle.recorders[2].wait_received(4)
        assert middle.recorders[2].statuses == [LinkStatus.DATA] * 3 + [LinkStatus.ABORT]
        assert kv_sender.aborts == [future.exception()]


def test_abort_of_a_job_that_was_just_given_up_does_not_forget_it(decoder: Decoder) -> None:
    """The engine has not looked yet since it was cancelled."""
    with middle_rank(decoder) as middle:
        job = middle.job()
        future = middle.engine.submit(job, KeepingSender())
        with middle.engine._changed:
            middle.engine.cancel(job.number)
            session = middle.engine._session
            assert session is not None
            session.received(Rank(0), LinkHeader.bare(Epoch(1), job.number, LinkStatus.ABORT))
        with pytest.raises(RequestCancelledError):
            future.result(WAIT_S)


def test_abort_that_comes_before_its_job_is_remembered(decoder: Decoder) -> None:
    with middle_rank(decoder) as middle:
        middle.send_bare(LinkStatus.ABORT)
        middle.recorders[0].wait_sent(1)
        with pytest.raises(JobAbortedError):
            middle.engine.submit(middle.job(), KeepingSender())
        middle.recorders[2].wait_received(1)
        assert middle.recorders[2].statuses == [LinkStatus.ABORT]


def test_abort_is_not_sent_once_all_has_been_passed_on(decoder: Decoder) -> None:
    with middle_rank(decoder) as middle:
        middle.recorders[2].gate.clear()
        kv_sender = KeepingSender()
        future = middle.engine.submit(middle.job(), kv_sender)
        middle.send_all_rows()
        middle.recorders[0].wait_sent(3)
        until(lambda: bool(kv_sender.finishes))
        middle.engine.cancel(JobId(1))
        assert future.exception(WAIT_S) is not None
        middle.recorders[2].gate.set()
        middle.recorders[2].wait_received(6)
        assert middle.recorders[2].statuses == [LinkStatus.DATA] * 6
