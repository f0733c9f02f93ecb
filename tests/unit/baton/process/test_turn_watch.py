"""When an engine's turn is thought to have stalled: without work soon, with work much later, unwatched never."""

import threading
import time
from queue import Queue

import pytest

from baton.process.turn_watch import TurnWatch, cpu_s, limit_s
from tests.support.manual_clock import ManualClock

FLOOR_S = 2.0
WAIT_S = 30.0


class Bench:
    """A watch whose two clocks the test moves."""

    def __init__(self) -> None:
        self.clock = ManualClock(100.0)
        self.used_s = 7.0
        self.compiles = False
        """Whether a process runs that the engine's thread has started."""
        self.watch = TurnWatch(self.clock, lambda: self.used_s, FLOOR_S, lambda: self.compiles)

    def live(self, seconds: float, share: float, *, has_work: bool = False) -> float:
        """Time passes, of which the engine's thread gets that share of a core; until it is over, or a stall is seen.
        Returns how much has passed."""
        passed_s = 0.0
        while passed_s < seconds and not self.watch.stall:
            self.clock.advance(self.watch.period_s)
            self.used_s += share * self.watch.period_s
            self.watch.look(has_work)
            passed_s += self.watch.period_s
        return passed_s


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_limit_is_four_expected_turns_and_no_less_than_the_floor() -> None:
    assert limit_s(FLOOR_S, 0.0) == FLOOR_S
    assert limit_s(FLOOR_S, 0.1) == FLOOR_S
    assert limit_s(FLOOR_S, 3.0) == 12.0


def test_engine_without_a_turn_never_stalls(bench: Bench) -> None:
    bench.live(1000.0, share=0.0)
    assert not bench.watch.stall


def test_work_that_no_turn_takes_stalls_at_the_floor_and_the_next_turn_ends_that(bench: Bench) -> None:
    bench.watch.begin("job 3", 50.0)
    bench.watch.end()
    bench.live(100.0, share=0.0)
    assert FLOOR_S < bench.live(100.0, share=0.0, has_work=True) <= FLOOR_S + 2 * bench.watch.period_s
    assert bench.watch.stall.startswith("work has waited after job 3 for ")
    bench.watch.begin("job 4", 0.0)
    bench.watch.look()
    assert not bench.watch.stall


@pytest.mark.parametrize(("turn_s", "limit"), [(0.0, 2.0), (1.5, 6.0)])
def test_turn_without_work_stalls_at_the_limit(bench: Bench, turn_s: float, limit: float) -> None:
    bench.watch.begin("job 3", turn_s)
    assert limit < bench.live(100.0, share=0.0) <= limit + 2 * bench.watch.period_s
    assert bench.watch.stall.startswith("job 3 has been in one turn for ")


def test_looks_in_quick_succession_take_no_microseconds_for_work(bench: Bench) -> None:
    bench.watch.begin("job 3", 0.0)
    for _ in range(10):
        bench.live(bench.watch.period_s, share=0.0)
        bench.used_s += 1e-5
        bench.watch.look()
    assert bench.watch.stall.startswith("job 3 has been in one turn for ")


def test_crowded_turn_ten_times_as_long_as_expected_goes_on(bench: Bench) -> None:
    bench.watch.begin("job 3", 1.0)
    bench.live(40.0, share=0.02)
    assert not bench.watch.stall


def test_turn_that_waits_for_a_compiler_goes_on(bench: Bench) -> None:
    bench.watch.begin("job 3", 0.0)
    bench.compiles = True
    bench.live(50.0, share=0.0)
    assert not bench.watch.stall
    bench.compiles = False
    assert FLOOR_S < bench.live(100.0, share=0.0) <= FLOOR_S + bench.watch.period_s


def test_work_makes_patience_begin_again(bench: Bench) -> None:
    bench.watch.begin("job 3", 0.0)
    for _ in range(5):
        bench.live(1.5, share=0.0)
        bench.live(0.5, share=1.0)
    assert not bench.watch.stall
    assert bench.live(100.0, share=0.0) == pytest.approx(2.5)


def test_turn_that_works_without_end_stalls_too(bench: Bench) -> None:
    bench.watch.begin("job 3", 1.0)
    assert bench.live(1e6, share=1.0) == pytest.approx(30 * 4.0, abs=2 * bench.watch.period_s)


def test_time_in_which_nobody_looked_does_not_count(bench: Bench) -> None:
    bench.watch.begin("job 3", 0.0)
    bench.clock.advance(1000.0)
    bench.watch.look()
    assert not bench.watch.stall
    assert bench.live(100.0, share=0.0) > 0.5


def test_end_of_the_turn_ends_the_stall(bench: Bench) -> None:
    bench.watch.begin("job 3", 0.0)
    bench.live(100.0, share=0.0)
    bench.watch.end()
    assert not bench.watch.stall
    bench.watch.begin("job 3", 0.0)
    bench.live(1.0, share=0.0)
    assert not bench.watch.stall


def test_look_tells_whether_the_engine_has_worked(bench: Bench) -> None:
    watch = bench.watch
    assert not watch.look()
    watch.begin("job 3", 0.0)
    watch.end()
    assert watch.look()
    assert not watch.look()
    watch.begin("job 4", 0.0)
    assert [watch.look(), watch.look()] == [True, True]
    bench.live(100.0, share=0.0)
    assert not watch.look()
    watch.end()


def test_processor_time_tells_work_from_waiting() -> None:
    gate, used = threading.Event(), Queue[float]()

    def live() -> None:
        while time.thread_time() < 0.1:
            pass
        used.put(time.thread_time())
        assert gate.wait(WAIT_S)

    thread = threading.Thread(target=live)
    assert cpu_s(thread) == 0.0
    thread.start()
    try:
        began_s, used_s = time.thread_time(), used.get(timeout=WAIT_S)
        while time.thread_time() < began_s + 0.1:  # this thread works now, and the other one waits
            pass
        assert used_s <= cpu_s(thread) < used_s + 0.05
    finally:
        gate.set()
        thread.join()
    assert cpu_s(thread) == 0.0
