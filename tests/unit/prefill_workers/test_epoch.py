"""A rank handles messages of every kind; its neighbours are the test itself, at the other end of links."""

import threading
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

from baton.errors import ChainError, JobAbortedError, LinkBrokenError, LinkStalledError
from baton.modeling.forward.decoder import Decoder
from baton.modeling.kv.buffers import KvBuffer
from baton.types import Epoch, JobId, KvLayout, Rank, RequestId, TokenRange
from prefill_workers.job import Job, JobReport
from prefill_workers.links import LinkStatus
from tests.support.engines.chains import WAIT_S, Hold, KeepingSender, reference_token, until
from tests.support.engines.middle_ranks import CHUNKS, IDS, Middle, middle_rank
from tests.support.manual_clock import ManualClock
from tests.support.models.tiny_models import random_decoder


@pytest.fixture
def decoder() -> Decoder:
    return random_decoder(num_layers=3)


# Data.


def test_all_rows_up_to_its_own_end_are_passed_on(decoder: Decoder) -> None:
    with middle_rank(decoder) as middle:
        future = middle.engine.submit(middle.job(), KeepingSender())
        middle.send_all_rows()
        report = future.result(WAIT_S)
        passed = middle.recorders[2].wait_received(6)
        layers = sorted((header.layer, header.tokens) for _, header, _ in passed)
        assert layers == [(layer, tokens) for layer in range(3) for tokens in CHUNKS[:2]]
        for source, header, payload in passed:
            assert source == 1
            rows = torch.frombuffer(bytearray(payload), dtype=torch.float32)
            expected = middle.kv.span(header.layer, header.tokens).flatten()
            assert float((rows - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
        assert report.num_bytes_sent == sum(len(payload) for _, _, payload in passed)


def test_message_that_comes_before_its_job_waits_for_it(decoder: Decoder) -> None:
    with middle_rank(decoder) as middle:
        middle.send_all_rows()
        kv_sender = KeepingSender()
        middle.engine.submit(middle.job(num_ranks=2), kv_sender).result(WAIT_S)
        assert kv_sender.finishes == [(reference_token(decoder, middle.job(num_ranks=2)),)]


def test_messages_of_a_job_that_never_comes_are_dropped_in_time(decoder: Decoder) -> None:
    clock = ManualClock()
    with middle_rank(decoder, clock=clock, floor_s=0.4) as middle, middle.engine.expect(Epoch(1), JobId(2)):
        middle.send_all_rows(number=1)
        middle.send_all_rows(number=2)
        middle.engine.submit(middle.job(2), KeepingSender()).result(WAIT_S)
        assert len(middle.recorders[0].wait_sent(6)) == 6
        assert {header.job for _, header, _ in middle.recorders[2].received_messages} == {2}


def test_job_whose_messages_were_dropped_is_refused_and_the_ranks_behind_are_told(decoder: Decoder) -> None:
    with middle_rank(decoder, clock=ManualClock(), floor_s=0.1) as middle:
        middle.send_rows(0)
        middle.recorders[0].wait_sent(1)
        with pytest.raises(JobAbortedError, match="no longer served by rank 1"):
            middle.engine.submit(middle.job(), KeepingSender())
        middle.recorders[2].wait_received(1)
        assert middle.recorders[2].statuses == [LinkStatus.ABORT]


@pytest.mark.parametrize(
    ("layer", "tokens"), [(1, CHUNKS[0]), (0, TokenRange(0, 1)), (0, TokenRange(0, 3)), (0, TokenRange(1, 3))]
)
def test_ranks_that_disagree_on_a_job_fail_it_alone(decoder: Decoder, layer: int, tokens: TokenRange) -> None:
    with middle_rank(decoder) as middle:
        future = middle.engine.submit(middle.job(1), KeepingSender())
        middle.send_rows(layer, tokens=tokens)
        with pytest.raises(ChainError, match="give all ranks the same job"):
            future.result(WAIT_S)
        following = middle.engine.submit(middle.job(2), KeepingSender())
        middle.send_all_rows(2)
        assert following.result(WAIT_S).num_bytes_sent > 0


def test_nothing_that_came_is_passed_on_for_a_job_that_has_failed(decoder: Decoder) -> None:
    hold = Hold()
    with middle_rank(decoder) as middle:
        future = middle.engine.submit(middle.job(), KeepingSender(hold))
        hold.wait_begun()
        middle.send_rows(1)  # not the layer that is due
        middle.send_rows(0)
        middle.recorders[0].wait_sent(2)
        hold.gate.set()
        assert isinstance(future.exception(WAIT_S), ChainError)
        own, abort = middle.recorders[2].wait_received(2)
        assert own[1].tokens == CHUNKS[1]  # its turn was under way
        assert abort[1].status is LinkStatus.ABORT


def test_rows_from_a_rank_that_is_not_in_front_fail_the_job(decoder: Decoder) -> None:
    with middle_rank(decoder) as middle:
        future = middle.engine.submit(middle.job(), KeepingSender())
        middle.links[0], middle.links[2] = middle.links[2], middle.links[0]
        middle.send_rows(0)
        with pytest.raises(ChainError, match="rank 2 sent"):
            future.result(WAIT_S)


def test_message_of_another_epoch_is_dropped(decoder: Decoder) -> None:
    with middle_rank(decoder) as middle:
        future = middle.engine.submit(middle.job(), KeepingSender())
        middle.send_rows(0, epoch=7)
        middle.recorders[0].wait_sent(1)
        assert not future.done()
        middle.send_all_rows()
        assert future.result(WAIT_S).num_bytes_sent > 0


def test_messages_of_a_cancelled_job_are_dropped(decoder: Decoder) -> None:
    with middle_rank(decoder) as middle:
        future = middle.engine.submit(middle.job(), KeepingSender())
        middle.send_rows(0)
        middle.recorders[2].wait_received(3)  # layer 0, and its own rows of layer 1
        middle.engine.cancel(JobId(1))
        assert future.exception(WAIT_S) is not None
        middle.send_rows(1)
        middle.send_rows(2)
        middle.recorders[0].wait_sent(3)
        middle.recorders[2].wait_received(4)
        assert middle.recorders[2].statuses == [LinkStatus.DATA] * 3 + [LinkStatus.ABORT]


# Peers that fail.


def test_broken_link_fails_all_jobs_with_one_retryable_error(decoder: Decoder) -> None:
    with middle_rank(decoder) as middle:
        senders = [KeepingSender(), KeepingSender()]
        futures = [middle.engine.submit(middle.job(n), senders[n]) for n in range(2)]
        middle.links[2].close()
        for future, kv_sender in zip(futures, senders, strict=True):
            error = future.exception(WAIT_S)
            assert isinstance(error, LinkBrokenError)
            assert error.retryable
            assert kv_sender.aborts == [error]
        assert "rank 2" in middle.engine.status().epoch_error


def test_message_that_waits_for_its_job_does_not_outlive_the_epoch(decoder: Decoder) -> None:
    with middle_rank(decoder, floor_s=1e3) as middle:  # it would wait half of that
        middle.send_rows(0)
        until(lambda: middle.engine.status().progress == 1)
        middle.engine.end_epoch(LinkBrokenError("the cable is cut"))
        middle.links[0].close()
        assert middle.links[0].wait_closed(WAIT_S)


def pass_time(middle: Middle, clock: ManualClock, future: Future[JobReport]) -> None:
    """Until the epoch has ended: a rank gives nobody up at its first look."""

    def later() -> bool:
        clock.advance(1.0)
        middle.poke()
        return future.done()

    until(later)


def test_silent_source_ends_the_epoch(decoder: Decoder) -> None:
    clock = ManualClock()
    with middle_rank(decoder, clock=clock, floor_s=60.0) as middle:
        future = middle.engine.submit(middle.job(), KeepingSender())
        until(lambda: middle.engine.status().progress == 2)  # it has sent its own rows, and waits
        pass_time(middle, clock, future)
        with pytest.raises(LinkStalledError, match="rank 0 has shown rank 1 no sign of life"):
            future.result(WAIT_S)
        assert isinstance(middle.recorders[2].wait_broken(), LinkBrokenError)


def test_target_that_takes_nothing_ends_the_epoch(decoder: Decoder) -> None:
    clock = ManualClock()
    with middle_rank(decoder, clock=clock, floor_s=60.0) as middle:
        middle.recorders[2].gate.clear()
        future = middle.engine.submit(middle.job(), KeepingSender())
        middle.send_all_rows()
        middle.recorders[0].wait_sent(3)
        pass_time(middle, clock, future)
        with pytest.raises(LinkStalledError, match="rank 2 has shown rank 1 no sign of life"):
            future.result(WAIT_S)


def test_overdue_peer_is_given_up_only_after_a_while_however_often_the_rank_looks(decoder: Decoder) -> None:
    clock = ManualClock()
    with middle_rank(decoder, clock=clock, floor_s=60.0) as middle:
        future = middle.submit_and_starve()
        with middle.engine._changed:
            session = middle.engine._session
            assert session is not None
            clock.advance(61.0)
            looks = [session.patience_s() for _ in range(5)]
            assert set(looks) == {looks[0]} and looks[0]
            assert session.error is None
            clock.advance(looks[0])
            assert session.patience_s() == 0.0
        with pytest.raises(LinkStalledError):
            future.result(WAIT_S)


def test_peer_is_given_the_whole_limit_from_its_last_sign_of_life(decoder: Decoder) -> None:
    clock = ManualClock()
    with middle_rank(decoder, clock=clock, floor_s=60.0) as middle:
        future = middle.submit_and_starve()
        for sent in range(1, 4):
            clock.advance(59.0)
            middle.send_bare(LinkStatus.ALIVE)
            middle.recorders[0].wait_sent(sent)
            middle.poke()
        assert not future.done()
        assert middle.engine.status().epoch_error == ""
        clock.advance(60.0)
        pass_time(middle, clock, future)
        with pytest.raises(LinkStalledError):
            future.result(WAIT_S)


def test_rank_that_stood_still_itself_reads_what_has_come_before_it_gives_a_peer_up(decoder: Decoder) -> None:
    clock = ManualClock()
    with middle_rank(decoder, clock=clock, floor_s=60.0) as middle:
        future = middle.submit_and_starve()
        with middle.engine._changed:  # nobody gets on here
            middle.send_bare(LinkStatus.ALIVE)
            clock.advance(61.0)
            middle.poke()
        middle.recorders[0].wait_sent(1)
        until(lambda: middle.engine.status().progress == 2)
        middle.send_all_rows()
        assert future.result(WAIT_S).rank == 1


def test_idle_rank_expects_nothing(decoder: Decoder) -> None:
    clock = ManualClock()
    with middle_rank(decoder, clock=clock, floor_s=1.0) as middle:
        clock.advance(1000.0)
        middle.poke()
        future = middle.engine.submit(middle.job(), KeepingSender())
        middle.send_all_rows()
        assert future.result(WAIT_S).num_bytes_sent > 0


def test_sign_of_life_is_passed_on(decoder: Decoder) -> None:
    with middle_rank(decoder) as middle:
        middle.engine.submit(middle.job(), KeepingSender())
        middle.recorders[2].wait_received(1)  # its own rows of layer 0
        middle.send_bare(LinkStatus.ALIVE)
        middle.recorders[2].wait_received(2)
        middle.send_bare(LinkStatus.ALIVE, number=5)  # unknown: nobody to tell
        middle.send_bare(LinkStatus.ABORT)
        middle.recorders[2].wait_received(3)
        assert middle.recorders[2].statuses == [LinkStatus.DATA, LinkStatus.ALIVE, LinkStatus.ABORT]


def test_rank_that_serves_another_job_asks_for_patience(decoder: Decoder) -> None:
    hold = Hold()
    with middle_rank(decoder, clock=ManualClock(), floor_s=0.4) as middle:
        alone = Job(JobId(1), Epoch(1), RequestId("a"), 1, (Rank(1),), (TokenRange(0, 6),), IDS)
        chained = Job(JobId(2), Epoch(1), RequestId("b"), 1, (Rank(1), Rank(2)), (TokenRange(0, 5), CHUNKS[2]), IDS)
        first = middle.engine.submit(alone, KeepingSender(hold))
        hold.wait_begun()
        middle.engine.submit(chained, KeepingSender())
        _, header, _ = middle.recorders[2].wait_received(1)[0]  # while the turn goes on
        hold.gate.set()
        first.result(WAIT_S)
        assert (header.status, header.job) == (LinkStatus.ALIVE, 2)


def test_rank_asks_for_patience_with_all_jobs_that_go_on_to_the_same_rank(decoder: Decoder) -> None:
    hold = Hold()
    with middle_rank(decoder, clock=ManualClock(), floor_s=0.4) as middle:
        chunks = (TokenRange(0, 5), CHUNKS[2])
        jobs = [Job(JobId(n), Epoch(1), RequestId("r"), 1, (Rank(1), Rank(2)), chunks, IDS) for n in (1, 2)]
        middle.engine.submit(jobs[0], KeepingSender(hold))
        hold.wait_begun()
        middle.engine.submit(jobs[1], KeepingSender())
        until(lambda: len({header.job for _, header, _ in middle.recorders[2].received_messages}) == 2)
        told = {(header.status, header.job) for _, header, _ in middle.recorders[2].received_messages}
        hold.gate.set()
        assert told == {(LinkStatus.ALIVE, 1), (LinkStatus.ALIVE, 2)}


def test_rank_that_works_in_one_turn_far_beyond_the_limit_keeps_its_peers_patient(decoder: Decoder) -> None:
    ended, clock = threading.Event(), ManualClock()

    def work(layer: int) -> None:
        while not ended.is_set():
            pass

    with middle_rank(decoder, clock=clock, floor_s=0.4) as middle:
        job = Job(JobId(1), Epoch(1), RequestId("a"), 1, (Rank(1), Rank(2)), (TokenRange(0, 5), CHUNKS[2]), IDS)
        future = middle.engine.submit(job, KeepingSender(work))
        try:
            middle.pass_limits(clock, 0.4, ranks=[2])
            assert set(middle.recorders[2].statuses) == {LinkStatus.ALIVE}
            assert not middle.engine.status().stall
        finally:
            ended.set()
        assert future.result(WAIT_S).num_bytes_sent > 0


def test_predicted_layer_lengthens_the_patience_with_peers(decoder: Decoder) -> None:
    clock = ManualClock()
    with middle_rank(decoder, clock=clock, floor_s=60.0) as middle:
        future = middle.submit_and_starve(replace(middle.job(num_ranks=2), layer_s=100.0))
        clock.advance(399.0)
        middle.poke()
        assert not future.done()
        clock.advance(2.0)
        pass_time(middle, clock, future)
        with pytest.raises(LinkStalledError, match="no sign of life for 400.0 s"):
            future.result(WAIT_S)


def test_received_rows_lie_in_the_layer_s_buffer(decoder: Decoder) -> None:
    made: list[KvBuffer] = []

    def make(layout: KvLayout, tokens: TokenRange) -> KvBuffer:
        made.append(KvBuffer(layout, tokens))
        return made[-1]

    with middle_rank(decoder, make_buffer=make) as middle:
        middle.engine.submit(middle.job(num_ranks=2), KeepingSender())
        middle.send_rows(0)
        middle.recorders[0].wait_sent(1)
        own, layer = made
        assert own.tokens == TokenRange(2, 6)
        assert layer.tokens == CHUNKS[0]
        assert torch.equal(layer.span(0, CHUNKS[0]), middle.kv.span(0, CHUNKS[0]))
