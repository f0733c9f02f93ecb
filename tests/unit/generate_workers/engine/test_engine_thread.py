"""The engine on its own thread: it sleeps when there is nothing to do, wakes for everything, and fails in the open."""

import sys
import threading
from pathlib import Path

import pytest
import torch

from baton.errors import UnavailableError
from baton.process.clock import SystemClock
from baton.sampling_params import SamplingParams
from baton.types import FinishReason
from tests.support.engines.generation import WAIT_S, harness, prompt, reference_ids
from tests.support.manual_clock import ManualClock

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
LONG = SamplingParams(max_tokens=60, ignore_eos=True)


class Watched(threading.Condition):
    """Tells that somebody began to wait, without a limit or with one."""

    def __init__(self) -> None:
        super().__init__()
        self.endless, self.limited = threading.Event(), threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        (self.endless if timeout is None else self.limited).set()
        return super().wait(timeout)


def test_the_thread_serves_streams_from_many_threads() -> None:
    with harness(clock=SystemClock(), num_slots=3, max_waiting=64) as made:
        made.engine.start()
        threads = [threading.Thread(target=made.submit, args=(prompt(3 + n), SHORT)) for n in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for stream in made.streams:
            assert stream.ended.wait(WAIT_S)
            assert stream.finish is FinishReason.LENGTH


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_thread_has_its_name_in_top() -> None:
    with harness(clock=SystemClock()) as made:
        made.engine.start()
        _, stream = made.submit(prompt(3), SHORT)
        assert stream.ended.wait(WAIT_S)
        assert Path(f"/proc/self/task/{made.engine.thread_id}/comm").read_text() == "generate-engine\n"


def test_a_sleeping_engine_wakes_for_a_commit() -> None:
    with harness(clock=SystemClock()) as made:
        made.engine.start()
        ref = made.reserve(9, 80, ttl_s=60.0).ref
        _, stream = made.submit(prompt(9), SHORT, ref=ref)
        made.push_and_commit(ref, prompt(9), SHORT)
        assert stream.ended.wait(WAIT_S)
        assert stream.token_ids == reference_ids(made.decoder, prompt(9), SHORT)


def test_a_sleeping_engine_wakes_for_a_deadline() -> None:
    clock = ManualClock(100.0)
    with harness(clock=clock) as made:
        made.engine._queue._condition = made.slots.changes.condition = watched = Watched()
        made.engine.start()
        _, stream = made.submit(prompt(9), SHORT, ref=made.reserve(9, 80, ttl_s=0.1).ref)
        assert watched.limited.wait(WAIT_S)
        clock.advance(0.1)
        assert stream.ended.wait(WAIT_S)
        assert stream.error.startswith("LeaseExpiredError")


def test_a_sleeping_engine_wakes_for_a_cancel_and_for_a_freed_slot() -> None:
    with harness(clock=SystemClock(), num_slots=1) as made:
        made.engine.start()
        stream_id, leased_stream = made.submit(prompt(9), SHORT, ref=made.reserve(9, 80, ttl_s=60.0).ref)
        _, waiting = made.submit(prompt(5), SHORT)
        made.engine.cancel(stream_id)
        assert leased_stream.ended.wait(WAIT_S)
        assert waiting.ended.wait(WAIT_S)
        assert waiting.finish is FinishReason.LENGTH


def test_an_idle_engine_sleeps_until_it_is_woken() -> None:
    with harness() as made:
        made.engine._queue._condition = made.slots.changes.condition = watched = Watched()
        _, stream = made.submit(prompt(5), SHORT)
        made.engine.start()
        assert stream.ended.wait(WAIT_S)
        assert watched.endless.wait(WAIT_S)


def test_a_broken_engine_ends_every_stream_and_says_so() -> None:
    class BrokenClock(SystemClock):
        broken = False

        def now_s(self) -> float:
            if self.broken:
                raise OSError("no clock")
            return super().now_s()

    clock = BrokenClock()
    with harness(clock=clock) as made:
        _, stream = made.submit(prompt(9), LONG)
        clock.broken = True
        made.engine.start()
        assert stream.ended.wait(WAIT_S)
        clock.broken = False
        made.engine.close()
        assert stream.error == "the generation engine failed: OSError: no clock: restart the worker"
        with pytest.raises(UnavailableError, match="no clock"):
            made.engine.status()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nSee the documentation"),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCompile with ..."),
        RuntimeError("Triton Error [CUDA]: device kernel image is invalid"),
    ],
)
def test_an_engine_whose_device_failed_ends_with_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    with harness() as made:
        _, stream = made.submit(prompt(9), LONG)
        monkeypatch.setattr(made.engine._pipeline._runner, "run", fail)
        made.engine.start()
        assert stream.ended.wait(WAIT_S)
        made.engine.close()
        [line] = [record for record in caplog.records if record.levelname == "ERROR"]
        assert line.exc_info is None and str(error).splitlines()[0] in line.getMessage()
        with pytest.raises(UnavailableError, match="restart the worker"):
            made.engine.status()


def test_status_counts_steps_rows_and_streams() -> None:
    with harness(num_slots=1, max_batched_tokens=16) as made:
        made.submit(prompt(20), SHORT)
        made.submit(prompt(5), SHORT)
        made.engine.step()
        status = made.engine.status()
        assert (status.num_streams, status.num_rows, status.num_steps) == (2, 1, 1)
        assert status.last_step is not None
        assert (status.last_step.num_decode_rows, status.last_step.num_prefill_tokens) == (0, 16)
        made.run()
        assert made.engine.status().num_steps == 5 + 4
