"""Engines live through epochs, one after the other, and leave nothing behind."""

import gc
import random
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from baton.errors import BatonError, ChainError, EpochEndedError, LinkBrokenError, StaleStampError, UnavailableError
from baton.modeling.forward.decoder import Decoder
from baton.modeling.kv.buffers import KvBuffer
from baton.process.clock import SystemClock
from baton.types import Epoch, JobId, KvLayout, Rank, RequestId, TokenRange
from prefill_workers.config import PrefillConfig
from prefill_workers.engine import PrefillEngine
from prefill_workers.job import Job
from tests.support.engines.chains import (
    WAIT_S,
    ChainGroup,
    Hold,
    KeepingSender,
    assert_right,
    random_run,
    submit_shuffled,
    until,
)
from tests.support.links.link_groups import MakeConnect, in_process_connects, torch_connects
from tests.support.models.tiny_models import random_decoder

pytestmark = pytest.mark.integration


@pytest.fixture
def decoder() -> Decoder:
    return random_decoder(num_layers=4)


def test_no_job_before_the_first_epoch(decoder: Decoder) -> None:
    engine = PrefillEngine(decoder, SystemClock(), PrefillConfig())
    try:
        assert engine.status().epoch_error == "no epoch has begun"
        with ChainGroup(decoder, 1) as group, pytest.raises(EpochEndedError, match="no epoch has begun"):
            engine.submit(group.prepare([1, 2], [TokenRange(0, 2)]).job, KeepingSender())
    finally:
        engine.close()


def test_job_of_another_epoch_is_refused(decoder: Decoder) -> None:
    with ChainGroup(decoder, 1) as group:
        late = group.prepare([1, 2], [TokenRange(0, 2)])
        group.start_epoch()
        with pytest.raises(EpochEndedError, match="of epoch 1"):
            group.submit(late)


def test_next_epoch_ends_what_is_in_flight_and_serves_anew(decoder: Decoder) -> None:
    with ChainGroup(decoder, 3) as group:
        run = group.prepare([1, 2, 3], [TokenRange(n, n + 1) for n in range(3)])
        group.submit(run, order=[1, 2])
        group.start_epoch()
        for rank in (1, 2):
            assert isinstance(run.error(rank), EpochEndedError | LinkBrokenError)
        assert_right(group, group.submit(group.prepare([1, 2, 3], [TokenRange(n, n + 1) for n in range(3)])))


def test_engine_that_hangs_says_so_and_joins_no_epoch_before_its_turn_has_ended(decoder: Decoder) -> None:
    hold = Hold()
    engine = PrefillEngine(decoder, SystemClock(), PrefillConfig(watchdog_floor_s=0.2))
    (connect,) = in_process_connects(1)
    try:
        engine.start_epoch(Epoch(1), Rank(0), 1, connect)
        job = Job(JobId(7), Epoch(1), RequestId("r"), 1, (Rank(0),), (TokenRange(0, 2),), (1, 2))
        future = engine.submit(job, KeepingSender(hold))
        hold.wait_begun()
        until(lambda: bool(engine.status().stall))
        assert engine.status().stall.startswith("job 7 has been in one turn for ")
        with pytest.raises(UnavailableError, match=r"hangs \(job 7 .*\): replace it"):
            engine.start_epoch(Epoch(2), Rank(0), 1, connect)
        hold.gate.set()
        assert isinstance(future.exception(WAIT_S), EpochEndedError)
        until(lambda: not engine.status().stall)
        engine.start_epoch(Epoch(2), Rank(0), 1, connect)
        assert engine.submit(replace(job, epoch=Epoch(2)), KeepingSender()).result(WAIT_S).rank == 0
    finally:
        hold.gate.set()
        engine.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_engine_whose_thread_has_ended_says_so(decoder: Decoder) -> None:
    def leave(layer: int) -> None:
        raise SystemExit  # no job's error: it ends the thread

    engine = PrefillEngine(decoder, SystemClock(), PrefillConfig(watchdog_floor_s=0.2))
    (connect,) = in_process_connects(1)
    try:
        engine.start_epoch(Epoch(1), Rank(0), 1, connect)
        job = Job(JobId(7), Epoch(1), RequestId("r"), 1, (Rank(0),), (TokenRange(0, 2),), (1, 2))
        engine.submit(job, KeepingSender(leave))
        until(lambda: engine.status().stall == "the engine's thread has ended, see its log")
        with pytest.raises(UnavailableError, match="replace it"):
            engine.start_epoch(Epoch(2), Rank(0), 1, connect)
    finally:
        engine.close()


def test_a_device_that_fails_ends_the_engine_with_one_line(decoder: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    def fail(layer: int) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCompile with ...")

    engine = PrefillEngine(decoder, SystemClock(), PrefillConfig())
    (connect,) = in_process_connects(1)
    try:
        engine.start_epoch(Epoch(1), Rank(0), 1, connect)
        job = Job(JobId(7), Epoch(1), RequestId("r"), 1, (Rank(0),), (TokenRange(0, 2),), (1, 2))
        future = engine.submit(job, KeepingSender(fail))
        assert isinstance(future.exception(WAIT_S), ChainError)
        until(lambda: engine.status().stall == "the engine's thread has ended, see its log")
        [line] = [record for record in caplog.records if record.levelname == "ERROR"]
        assert line.exc_info is None and "illegal memory access" in line.getMessage()
    finally:
        engine.close()


def test_ended_epoch_refuses_jobs_until_the_next(decoder: Decoder) -> None:
    with ChainGroup(decoder, 1) as group:
        group.engines[0].end_epoch(LinkBrokenError("the cable is cut"))
        with pytest.raises(EpochEndedError, match="the cable is cut"):
            group.submit(group.prepare([1, 2], [TokenRange(0, 2)]))
        assert group.engines[0].status().epoch_error == "the cable is cut"
        group.start_epoch()
        assert group.engines[0].status().epoch_error == ""
        assert_right(group, group.submit(group.prepare([1, 2], [TokenRange(0, 2)])))


def test_end_of_one_rank_s_epoch_ends_it_for_all(decoder: Decoder) -> None:
    with ChainGroup(decoder, 3) as group:
        run = group.prepare([1, 2, 3], [TokenRange(n, n + 1) for n in range(3)])
        group.submit(run, order=[1, 2])
        group.engines[0].end_epoch(LinkBrokenError("the cable is cut"))
        assert isinstance(run.error(1), LinkBrokenError)
        assert isinstance(run.error(2), LinkBrokenError)


def test_epoch_must_be_above_the_last(decoder: Decoder) -> None:
    with ChainGroup(decoder, 1) as group, pytest.raises(EpochEndedError, match="not above 1"):
        group.engines[0].start_epoch(Epoch(1), Rank(0), 1, in_process_connects(1)[0])


def test_epoch_that_not_all_ranks_joined_has_ended(decoder: Decoder) -> None:
    with ChainGroup(decoder, 2) as group:
        with pytest.raises(LinkBrokenError, match="met not all"):
            group.engines[0].start_epoch(Epoch(2), Rank(0), 2, in_process_connects(2, timeout_s=0.1)[0])
        assert group.engines[0].status().epoch == 2
        assert "met not all" in group.engines[0].status().epoch_error
        group.epoch = Epoch(2)
        group.start_epoch()
        assert_right(group, group.submit(group.prepare([1, 2, 3], [TokenRange(0, 2), TokenRange(2, 3)])))


def test_many_epochs_under_load_resolve_every_future(decoder: Decoder) -> None:
    rng = random.Random(4)
    with ChainGroup(decoder, 3) as group:
        for _ in range(15):
            runs = [random_run(group, rng) for _ in range(4)]
            submit_shuffled(group, runs, rng)
            group.start_epoch()
            for run in runs:
                for future in run.futures.values():
                    assert isinstance(future.exception(WAIT_S), BatonError | None)
        assert_right(group, group.submit(random_run(group, rng)))


# The end, and what is left.


def test_close_fails_what_is_in_flight_and_refuses_more(decoder: Decoder) -> None:
    group = ChainGroup(decoder, 2)
    with group:
        run = group.prepare([1, 2, 3], [TokenRange(0, 2), TokenRange(2, 3)])
        group.submit(run, order=[1])
        group.engines[1].close()
        assert isinstance(run.error(1), UnavailableError)
        with pytest.raises(EpochEndedError):
            group.engines[1].submit(group.prepare([1, 2], [TokenRange(0, 2)], ranks=[1]).job, KeepingSender())
        with pytest.raises(UnavailableError):
            group.engines[1].start_epoch(Epoch(2), Rank(0), 1, in_process_connects(1)[0])


def test_close_ends_every_thread_and_may_be_called_again(decoder: Decoder) -> None:
    before = set(threading.enumerate())
    with ChainGroup(decoder, 3) as group:
        group.submit(random_run(group, random.Random(0))).reports()
    group.engines[0].close()
    assert set(threading.enumerate()) <= before


@pytest.fixture
def no_garbage_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("connects", [in_process_connects, torch_connects])
@pytest.mark.parametrize("end", ["report", "cancel", "refused push"])
def test_memory_of_a_settled_job_is_given_back_at_once(
    no_garbage_collector: None, decoder: Decoder, connects: MakeConnect, end: str
) -> None:
    buffers: list[weakref.ref[KvBuffer]] = []

    def make(layout: KvLayout, tokens: TokenRange) -> KvBuffer:
        buffer = KvBuffer(layout, tokens)
        buffers.append(weakref.ref(buffer))
        return buffer

    def on_push(rank: Rank, layer: int) -> None:
        if (rank, layer) == (1, 1) and end == "refused push":
            raise StaleStampError("stamp 3 is stale")

    with ChainGroup(decoder, 3, connects=connects, make_buffer=make) as group:
        run = group.prepare([1, 2, 3], [TokenRange(n, n + 1) for n in range(3)], on_push=on_push)
        group.submit(run, order=[2, 1])
        if end == "cancel":
            group.engines[1].cancel(run.job.number)
        group.submit(run, order=[0])
        errors = [future.exception(WAIT_S) for future in run.futures.values()]
        assert any(errors) == (end != "report")
        del run
        assert len(buffers) >= 3
        until(lambda: not any(buffer() for buffer in buffers))


def test_status_counts(decoder: Decoder) -> None:
    with ChainGroup(decoder, 2) as group:
        before = group.engines[1].status()
        run = group.prepare([1, 2, 3], [TokenRange(0, 2), TokenRange(2, 3)])
        group.submit(run, order=[1])
        assert group.engines[1].status().num_jobs == 1
        group.submit(run, order=[0]).reports()
        after = group.engines[1].status()
        assert (after.epoch, after.epoch_error, after.num_jobs) == (1, "", 0)
        assert after.num_jobs_done == before.num_jobs_done + 1
        assert after.progress >= before.progress + 2 * decoder.config.num_layers
