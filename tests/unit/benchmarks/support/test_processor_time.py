"""Processor time of groups of processes."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterable

import pytest

from benchmarks.support import processor_time
from benchmarks.support.processor_time import (
    TICK_S,
    command_of,
    main_threads_used_s,
    share_of_a_core,
    until_quiet,
    used_s,
    with_descendants,
)

pytestmark = pytest.mark.integration


def test_a_share_counts_processes_that_were_there_all_along() -> None:
    assert share_of_a_core({1: 1.0, 2: 5.0}, {1: 1.5, 3: 9.0}, 2.0) == 0.25


def test_a_share_is_never_finer_than_the_kernel_counts() -> None:
    assert share_of_a_core({1: 1.0}, {1: 1.0}, 2.0) == TICK_S / 2.0


def test_this_process_has_used_time_and_a_missing_one_is_left_out() -> None:
    own = os.getpid()
    assert used_s([own, 2**22 + 1]).keys() == {own}
    assert used_s([own])[own] == pytest.approx(sum(os.times()[:2]), abs=0.2)


def test_a_main_thread_has_used_a_part_of_its_process() -> None:
    own = os.getpid()
    found = main_threads_used_s([own, 2**22 + 1])
    assert found.keys() == {own}
    assert 0 < found[own] <= used_s([own])[own] + 0.2


def test_descendants_are_found_with_their_commands() -> None:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == "1\n"
        found = with_descendants([child.pid])
        assert child.pid in found and len(found) == 2
        assert "subprocess" in command_of(child.pid)
        child.communicate("\n")
    assert with_descendants([child.pid]) == set()
    assert command_of(child.pid) == ""


def test_processes_are_waited_for_until_they_no_longer_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, is_quiet = threading.Semaphore(0), threading.Event()
    total_s = 0.0

    def used_by(pids: Iterable[int]) -> dict[int, float]:
        """A minute of processor time since the last question, or none."""
        nonlocal total_s
        total_s += 0.0 if is_quiet.is_set() else 60.0
        asked.release()
        return dict.fromkeys(pids, total_s)

    monkeypatch.setattr(processor_time, "used_s", used_by)
    waiting = threading.Thread(target=until_quiet, args=([1],))
    waiting.start()
    assert all(asked.acquire(timeout=60) for _ in range(4))
    assert waiting.is_alive()
    is_quiet.set()
    waiting.join(60)
    assert not waiting.is_alive()
