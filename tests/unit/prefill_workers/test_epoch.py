"""What a rank does with messages of every kind: its neighbours here are the test itself, at the other end of links."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from baton.clock import Clock, ManualClock, SystemClock
from baton.errors import ChainError, JobAbortedError, LinkBrokenError, LinkStalledError
from baton.ids import Epoch, JobId, Rank, RequestId
from baton.types import KvLayout, TokenRange
from modeling.decoder import Decoder
from modeling.kv_buffers import KvBuffer, byte_view
from prefill_workers.engine import MakeBuffer, PrefillEngine
from prefill_workers.job import Job
from prefill_workers.links import LinkHeader, Links, LinkStatus
from tests.support.chains import WAIT_S, KeepingOutlet, cached_prefix, reference_token, until
from tests.support.link_groups import Recorder, in_process_connects
from tests.support.tiny_models import random_decoder

IDS = (5, 6, 7, 8, 9, 10)
CHUNKS = (TokenRange(0, 2), TokenRange(2, 5), TokenRange(5, 6))


class Middle:
    """Rank 1 of 3 is an engine; ranks 0 and 2 are bare links and what they record."""

    def __init__(self, engine: PrefillEngine, links: dict[int, Links], recorders: dict[int, Recorder]) -> None:
        self.engine = engine
        self.links = links
        self.recorders = recorders
        self.decoder = engine.decoder
        self.kv = cached_prefix(self.decoder, IDS, len(IDS))

    def job(self, number: int = 1, num_ranks: int = 3) -> Job:
        """Ranks 0 to 2, or 0 and 1."""
        chunks = CHUNKS if num_ranks == 3 else (CHUNKS[0], TokenRange(2, 6))
        ranks = tuple(Rank(rank) for rank in range(num_ranks))
        return Job(JobId(number), Epoch(1), RequestId("r"), 1, ranks, chunks, IDS)

    def send_rows(self, layer: int, number: int = 1, tokens: TokenRange = CHUNKS[0], epoch: int = 1) -> None:
        """What rank 0 would send."""
        payload = byte_view(self.kv.span(layer, tokens).clone())
        header = LinkHeader(Epoch(epoch), JobId(number), layer, tokens, LinkStatus.DATA, payload.nbytes)
        self.links[0].send(Rank(1), header, payload)

    def send_all_rows(self, number: int = 1) -> None:
        for layer in range(self.decoder.config.num_layers):
            self.send_rows(layer, number)

    def send_bare(self, status: LinkStatus, number: int = 1) -> None:
        self.links[0].send(Rank(1), LinkHeader.bare(Epoch(1), JobId(number), status), None)

    def poke(self) -> None:
        """Makes a waiting engine look at a clock that the test has moved."""
        with self.engine._changed:
            self.engine._changed.notify_all()


@contextmanager
def middle_rank(
    decoder: Decoder, *, clock: Clock | None = None, floor_s: float = 20.0, make_buffer: MakeBuffer = KvBuffer
) -> Iterator[Middle]:
    engine = PrefillEngine(decoder, clock or SystemClock(), watchdog_floor_s=floor_s, make_buffer=make_buffer)
    recorders = {0: Recorder(), 2: Recorder()}
    connects = in_process_connects(3)
    with ThreadPoolExecutor(2) as pool:
        bare = {rank: pool.submit(connects[rank], recorder) for rank, recorder in recorders.items()}
        engine.start_epoch(Epoch(1), Rank(1), 3, connects[1])
        links = {rank: future.result(WAIT_S) for rank, future in bare.items()}
    try:
        yield Middle(engine, links, recorders)
    finally:
        for recorder in recorders.values():
            recorder.gate.set()
        engine.close()
        for each in links.values():
            each.close()
            assert each.wait_closed(WAIT_S)


@pytest.fixture
def decoder() -> Decoder:
    torch.set_num_threads(1)
    return random_decoder(num_layers=3)


def statuses(recorder: Recorder) -> list[LinkStatus]:
    return [header.status for _, header, _ in recorder.received_messages]


# Data.


def test_all_rows_up_to_its_own_end_are_passed_on(decoder: Decoder) -> None:
    with middle_rank(decoder) as middle:
        future = middle.engine.submit(middle.job(), KeepingOutlet())
        middle.send_all_rows()
        report = future.result(WAIT_S)
        passed = middle.recorders[2].wait_received(3)
        for layer, (source, header, payload) in enumerate(passed):
            assert (source, header.layer, header.tokens) == (1, layer, TokenRange(0, 5))
            rows = torch.frombuffer(bytearray(payload), dtype=torch.float32)
            expected = middle.kv.span(layer, TokenRange(0, 5)).flatten()
            assert float((rows - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
        assert report.num_bytes_sent == sum(len(payload) for _, _, payload in passed)


def test_message_that_comes_before_its_job_waits_for_it(decoder: Decoder) -> None:
    with middle_rank(decoder) as middle:
        middle.send_all_rows()
        outlet = KeepingOutlet()
        middle.engine.submit(middle.job(num_ranks=2), outlet).result(WAIT_S)
        assert outlet.finishes == [(reference_token(decoder, middle.job(num_ranks=2)),)]


def test_messages_of_a_job_that_never_comes_are_dropped_in_time(decoder: Decoder) -> None:
    with middle_rank(decoder, floor_s=0.4) as middle:
        middle.send_all_rows(number=1)
        middle.send_all_rows(number=2)
        middle.engine.submit(middle.job(2), KeepingOutlet()).result(WAIT_S)
        assert len(middle.recorders[0].wait_sent(6)) == 6
        assert {header.job for _, header, _ in middle.recorders[2].received_messages} == {2}


def test_job_whose_messages_were_dropped_is_refused_and_the_ranks_behind_are_told(decoder: Decoder) -> None:
    with middle_rank(decoder, floor_s=0.1) as middle:
        middle.send_rows(0)
        middle.recorders[0].wait_sent(1)
        with pytest.raises(JobAbortedError, match="no longer served by rank 1"):
            middle.engine.submit(middle.job(), KeepingOutlet())
        middle.recorders[2].wait_received(1)
        assert statuses(middle.recorders[2]) == [LinkStatus.ABORT]


@pytest.mark.parametrize(
    ("layer", "tokens"), [(1, CHUNKS[0]), (0, TokenRange(0, 1)), (0, TokenRange(0, 3)), (0, TokenRange(1, 3))]
)
def test_ranks_that_disagree_on_a_job_fail_it_alone(decoder: Decoder, layer: int, tokens: TokenRange) -> None:
    with middle_rank(decoder) as middle:
        future = middle.engine.submit(middle.job(1), KeepingOutlet())
        middle.send_rows(layer, tokens=tokens)
        with pytest.raises(ChainError, match="give all ranks the same job"):
            future.result(WAIT_S)
        following = middle.engine.submit(middle.job(2), KeepingOutlet())
        middle.send_all_rows(2)
        assert following.result(WAIT_S).num_bytes_sent > 0


def test_nothing_is_passed_on_for_a_job_that_has_failed(decoder: Decoder) -> None:
    gate, holding = threading.Event(), threading.Event()

    def hold(layer: int) -> None:
        holding.set()
        assert gate.wait(WAIT_S)

    with middle_rank(decoder) as middle:
        future = middle.engine.submit(middle.job(), KeepingOutlet(hold))
        assert holding.wait(WAIT_S)
        middle.send_rows(1)  # not the layer that is due
        middle.send_rows(0)
        middle.recorders[0].wait_sent(2)
        gate.set()
        assert isinstance(future.exception(WAIT_S), ChainError)
        middle.recorders[2].wait_received(1)
        assert statuses(middle.recorders[2]) == [LinkStatus.ABORT]


def test_rows_from_a_rank_that_is_not_in_front_fail_the_job(decoder: Decoder) -> None:
    with middle_rank(decoder) as middle:
        future = middle.engine.submit(middle.job(), KeepingOutlet())
        middle.links[0], middle.links[2] = middle.links[2], middle.links[0]
        middle.send_rows(0)
        with pytest.raises(ChainError, match="rank 2 sent"):
            future.result(WAIT_S)


def test_message_of_another_epoch_is_dropped(decoder: Decoder) -> None:
    with middle_rank(decoder) as middle:
        future = middle.engine.submit(middle.job(), KeepingOutlet())
        middle.send_rows(0, epoch=7)
        middle.recorders[0].wait_sent(1)
        assert not future.done()
        middle.send_all_rows()
        assert future.result(WAIT_S).num_bytes_sent > 0


def test_messages_of_a_cancelled_job_are_dropped(decoder: Decoder) -> None:
    with middle_rank(decoder) as middle:
        future = middle.engine.submit(middle.job(), KeepingOutlet())
        middle.send_rows(0)
        middle.recorders[2].wait_received(1)
        middle.engine.cancel(JobId(1))
        assert future.exception(WAIT_S) is not None
        middle.send_rows(1)
        middle.send_rows(2)
        middle.recorders[0].wait_sent(3)
        middle.recorders[2].wait_received(2)
        assert statuses(middle.recorders[2]) == [LinkStatus.DATA, LinkStatus.ABORT]


# Aborts.


def test_abort_fails_the_job_and_is_passed_on(decoder: Decoder) -> None:
    with middle_rank(decoder) as middle:
        outlet = KeepingOutlet()
        future = middle.engine.submit(middle.job(), outlet)
        middle.send_rows(0)
        middle.recorders[2].wait_received(1)
        middle.send_bare(LinkStatus.ABORT)
        with pytest.raises(JobAbortedError, match="rank 0 gave job 1 up"):
            future.result(WAIT_S)
        middle.recorders[2].wait_received(2)
        assert statuses(middle.recorders[2]) == [LinkStatus.DATA, LinkStatus.ABORT]
        assert outlet.aborts == [future.exception()]


def test_abort_that_comes_before_its_job_is_remembered(decoder: Decoder) -> None:
    with middle_rank(decoder) as middle:
        middle.send_bare(LinkStatus.ABORT)
        middle.recorders[0].wait_sent(1)
        with pytest.raises(JobAbortedError):
            middle.engine.submit(middle.job(), KeepingOutlet())
        middle.recorders[2].wait_received(1)
        assert statuses(middle.recorders[2]) == [LinkStatus.ABORT]


def test_abort_is_not_sent_once_all_has_been_passed_on(decoder: Decoder) -> None:
    with middle_rank(decoder) as middle:
        middle.recorders[2].gate.clear()
        outlet = KeepingOutlet()
        future = middle.engine.submit(middle.job(), outlet)
        middle.send_all_rows()
        middle.recorders[0].wait_sent(3)
        until(lambda: bool(outlet.finishes))
        middle.engine.cancel(JobId(1))
        assert future.exception(WAIT_S) is not None
        middle.recorders[2].gate.set()
        middle.recorders[2].wait_received(3)
        assert statuses(middle.recorders[2]) == [LinkStatus.DATA] * 3


# Peers that fail.


def test_broken_link_fails_all_jobs_with_one_retryable_error(decoder: Decoder) -> None:
    with middle_rank(decoder) as middle:
        outlets = [KeepingOutlet(), KeepingOutlet()]
        futures = [middle.engine.submit(middle.job(n), outlets[n]) for n in range(2)]
        middle.links[2].close()
        for future, outlet in zip(futures, outlets, strict=True):
            error = future.exception(WAIT_S)
            assert isinstance(error, LinkBrokenError)
            assert error.retryable
            assert outlet.aborts == [error]
        assert "rank 2" in middle.engine.status().epoch_error


def test_message_that_waits_for_its_job_does_not_outlive_the_epoch(decoder: Decoder) -> None:
    with middle_rank(decoder) as middle:  # the message might wait for 10 s
        middle.send_rows(0)
        middle.engine.end_epoch(LinkBrokenError("the cable is cut"))
        middle.links[0].close()
        assert middle.links[0].wait_closed(5.0)


def test_silent_source_ends_the_epoch(decoder: Decoder) -> None:
    with middle_rank(decoder, floor_s=0.2) as middle:
        future = middle.engine.submit(middle.job(), KeepingOutlet())
        with pytest.raises(LinkStalledError, match="rank 0 has shown rank 1 no sign of life"):
            future.result(WAIT_S)
        assert isinstance(middle.recorders[2].wait_broken(), LinkBrokenError)


def test_target_that_takes_nothing_ends_the_epoch(decoder: Decoder) -> None:
    with middle_rank(decoder, floor_s=0.2) as middle:
        middle.recorders[2].gate.clear()
        future = middle.engine.submit(middle.job(), KeepingOutlet())
        middle.send_all_rows()
        with pytest.raises(LinkStalledError, match="rank 2 has shown rank 1 no sign of life"):
            future.result(WAIT_S)


def test_peer_is_given_the_whole_limit_from_its_last_sign_of_life(decoder: Decoder) -> None:
    clock = ManualClock()
    with middle_rank(decoder, clock=clock, floor_s=60.0) as middle:
        future = middle.engine.submit(middle.job(num_ranks=2), KeepingOutlet())
        until(lambda: middle.engine.status().progress == 1)  # it has done what it can, and waits
        for sent in range(1, 4):
            clock.advance(59.0)
            middle.send_bare(LinkStatus.ALIVE)
            middle.recorders[0].wait_sent(sent)
            middle.poke()
        assert not future.done()
        assert middle.engine.status().epoch_error == ""
        clock.advance(60.0)
        middle.poke()
        with pytest.raises(LinkStalledError):
            future.result(WAIT_S)


def test_idle_rank_expects_nothing(decoder: Decoder) -> None:
    clock = ManualClock()
    with middle_rank(decoder, clock=clock, floor_s=1.0) as middle:
        clock.advance(1000.0)
        middle.poke()
        future = middle.engine.submit(middle.job(), KeepingOutlet())
        middle.send_all_rows()
        assert future.result(WAIT_S).num_bytes_sent > 0


def test_sign_of_life_is_passed_on(decoder: Decoder) -> None:
    with middle_rank(decoder) as middle:
        middle.engine.submit(middle.job(), KeepingOutlet())
        middle.send_bare(LinkStatus.ALIVE)
        assert middle.recorders[2].wait_received(1)[0][1].status is LinkStatus.ALIVE
        middle.send_bare(LinkStatus.ALIVE, number=5)  # unknown: nobody to tell
        middle.send_bare(LinkStatus.ABORT)
        middle.recorders[2].wait_received(2)
        assert statuses(middle.recorders[2]) == [LinkStatus.ALIVE, LinkStatus.ABORT]


def test_rank_that_serves_another_job_asks_for_patience(decoder: Decoder) -> None:
    clock = ManualClock()
    gate, holding = threading.Event(), threading.Event()

    def hold(layer: int) -> None:
        if layer == 0:
            holding.set()
            assert gate.wait(WAIT_S)

    with middle_rank(decoder, clock=clock, floor_s=60.0) as middle:
        alone = Job(JobId(1), Epoch(1), RequestId("a"), 1, (Rank(1),), (TokenRange(0, 6),), IDS)
        chained = Job(JobId(2), Epoch(1), RequestId("b"), 1, (Rank(1), Rank(2)), (TokenRange(0, 5), CHUNKS[2]), IDS)
        first = middle.engine.submit(alone, KeepingOutlet(hold))
        assert holding.wait(WAIT_S)
        middle.engine.submit(chained, KeepingOutlet())
        clock.advance(16.0)  # over a quarter of the limit
        gate.set()
        first.result(WAIT_S)
        _, header, _ = middle.recorders[2].wait_received(1)[0]
        assert (header.status, header.job) == (LinkStatus.ALIVE, 2)


def test_received_rows_lie_in_the_job_s_buffer(decoder: Decoder) -> None:
    made: list[KvBuffer] = []

    def make(layout: KvLayout, tokens: TokenRange) -> KvBuffer:
        made.append(KvBuffer(layout, tokens))
        return made[-1]

    with middle_rank(decoder, make_buffer=make) as middle:
        middle.engine.submit(middle.job(num_ranks=2), KeepingOutlet())
        middle.send_rows(0)
        middle.recorders[0].wait_sent(1)
        assert torch.equal(made[0].span(0, CHUNKS[0]), middle.kv.span(0, CHUNKS[0]))
        assert made[0].tokens == TokenRange(0, 6)
