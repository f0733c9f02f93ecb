"""An engine whose thread stands still inside a step says so; one that waits for work, or goes on, does not."""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from baton.modeling.forward.sampling import sample
from baton.planning.step_cost import StepCost
from baton.planning.work_cost import WorkCost
from baton.sampling_params import SamplingParams
from generate_workers.engine import verified
from generate_workers.engine.chunked_prefill import ChunkedPrefillPolicy
from generate_workers.engine.step_bound import Decoding, PrefillWork, StepBound
from tests.support.engines.generation import WAIT_S, Harness, harness, prompt, reference_ids
from tests.support.manual_clock import ManualClock

FLOOR_S = 10.0
TWO = SamplingParams(max_tokens=6, seed=1, ignore_eos=True, n=2)


@dataclass
class Gate:
    """Stops the engine's thread in a call, once it is shut."""

    reached: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def gated(*args: Any, **options: Any) -> Any:
            self.reached.set()
            assert self.opened.wait(WAIT_S), "the test left the gate shut"
            return call(*args, **options)

        return gated


@contextmanager
def stopped(where: str, patch: pytest.MonkeyPatch, clock: ManualClock) -> Iterator[tuple[Harness, Gate]]:
    """An engine with a stream, whose thread stands still inside a forward, inside sampling or inside a copy of KV."""
    gate = Gate()
    with harness(clock=clock) as made:
        if where == "forward":
            patch.setattr(made.decoder, "forward", gate.before(made.decoder.forward))
        elif where == "sampling":
            patch.setattr(verified, "sample", gate.before(sample))
        else:
            patch.setattr(made.engine.residency, "copy", gate.before(made.engine.residency.copy))
        made.engine.start()
        try:
            made.submit(prompt(9), TWO)
            assert gate.reached.wait(WAIT_S)
            made.engine.status()  # what the thread has worked before counts no more
            yield made, gate
        finally:
            gate.opened.set()


def look(made: Harness, clock: ManualClock, seconds: float) -> str:
    """Ask for the status once a second, as heartbeats do; what it says in the end of a stall."""
    for _ in range(round(seconds)):
        clock.advance(1.0)
        made.engine.status()
    return made.engine.status().stall


@pytest.mark.parametrize("where", ["forward", "sampling", "copy"])
def test_thread_that_stands_still_in_a_step_is_told(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(100.0)
    with stopped(where, monkeypatch, clock) as (made, gate):
        assert look(made, clock, FLOOR_S - 1) == ""
        assert look(made, clock, 2).startswith("step 1 has been in one turn for 11.0 s")
        gate.opened.set()
        (stream,) = made.streams
        assert stream.ended.wait(WAIT_S)
        for choice in range(TWO.n):
            assert stream.choice(choice).token_ids == reference_ids(made.decoder, prompt(9), TWO.of_choice(choice))


@pytest.mark.parametrize("where", ["before a stream", "between steps"])
def test_thread_that_stands_still_outside_a_step_is_told_once_there_is_work(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, gate = ManualClock(100.0), Gate()
    with harness(clock=clock) as made:
        if where == "before a stream":
            monkeypatch.setattr(made.engine, "_await_work", gate.before(made.engine._await_work))
        made.engine.start()
        try:
            if where == "before a stream":
                assert gate.reached.wait(WAIT_S)
                assert look(made, clock, FLOOR_S + 1) == ""
            else:
                monkeypatch.setattr(made.engine, "_await_work", gate.before(made.engine._await_work))
            made.submit(prompt(9), TWO)
            assert gate.reached.wait(WAIT_S)
            made.engine.status()
            assert look(made, clock, FLOOR_S - 1) == ""
            assert look(made, clock, 2).startswith("work has waited after ")
        finally:
            gate.opened.set()
        assert made.streams[0].ended.wait(WAIT_S)
        assert made.engine.status().stall == ""


def test_engine_without_work_does_not_stall() -> None:
    clock = ManualClock(100.0)
    with harness(clock=clock) as made:
        made.engine.start()
        assert look(made, clock, 100) == ""


COST = WorkCost(1e-3, 1e-4, 1e-7, 1e-8)


class _Known(StepBound):
    """Expects so many seconds of each step."""

    def __init__(self, step_s: float) -> None:
        super().__init__(StepCost(COST), math.inf)
        self._step_s = step_s

    def expected_s(self, decoding: Decoding, work: float) -> float:
        return self._step_s


@pytest.mark.parametrize(("took_s", "limit_s"), [(0.01, FLOOR_S), (5.0, 20.0)])
def test_limit_follows_what_steps_take(took_s: float, limit_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(100.0)
    with harness(clock=clock, scheduling_policy=ChunkedPrefillPolicy(16, _Known(took_s), PrefillWork())) as made:
        gate = Gate()
        monkeypatch.setattr(made.decoder, "forward", gate.before(made.decoder.forward))
        made.engine.start()
        made.submit(prompt(9), TWO)
        try:
            assert gate.reached.wait(WAIT_S)
            made.engine.status()
            assert look(made, clock, limit_s - 1) == ""
            assert look(made, clock, 2) != ""
        finally:
            gate.opened.set()
        assert made.streams[0].ended.wait(WAIT_S)


def test_plan_expects_what_the_latest_steps_took() -> None:
    bound = StepBound(StepCost(COST), 2.0)
    assert bound.expected_s(Decoding(2, 100), 30.0) == pytest.approx(COST.plain_s(2, 50) + 30 * COST.token_s)
    bound.observe(Decoding(2, 100), 0.0, 0.2)
    bound.observe(Decoding(2, 100), 30.0, 0.5)
    assert bound.expected_s(Decoding(2, 100), 0.0) == pytest.approx(0.2)
    assert bound.expected_s(Decoding(2, 100), 30.0) == pytest.approx(0.5)
