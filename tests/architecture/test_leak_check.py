"""The check that follows every test (tests/support/guards/leaks.py) sees what is left behind, and nothing else."""

import asyncio
import subprocess
import sys
import threading

import pytest

from tests.support.guards import leaks

pytestmark = pytest.mark.integration


def test_a_blocked_thread_is_seen_until_it_ends() -> None:
    before, release = leaks.live_threads(), threading.Event()
    thread = threading.Thread(target=release.wait, name="planted")
    thread.start()
    try:
        assert leaks.threads_left(before, grace_s=0) == ["planted"]
    finally:
        release.set()
        thread.join()
    assert leaks.threads_left(before, grace_s=0) == []


def test_a_thread_that_ends_within_the_grace_is_no_leak() -> None:
    before, release = leaks.live_threads(), threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    timer = threading.Timer(0.05, release.set)
    timer.start()
    assert leaks.threads_left(before) == []


def test_a_child_process_is_seen_until_it_is_reaped() -> None:
    before = leaks.child_processes()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        (left,) = leaks.processes_left(before, grace_s=0)
        assert left.startswith(f"{child.pid}: ")
        assert child.stdin is not None
        child.stdin.close()
        child.wait(timeout=30)
        assert leaks.processes_left(before, grace_s=0) == []


async def test_a_waiting_task_is_seen_until_it_is_done() -> None:
    before, release = asyncio.all_tasks(), asyncio.Event()
    task = asyncio.create_task(release.wait(), name="planted")
    (left,) = await leaks.tasks_left(before, grace_s=0)
    assert "planted" in left
    release.set()
    await task
    assert await leaks.tasks_left(before, grace_s=0) == []
