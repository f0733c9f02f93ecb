"""A thread of its own ends with its call, holds nothing of the call after it, and leaves no team of OpenMP's threads
behind, which would slow the teams of others down."""

import asyncio
import sys
import threading
from pathlib import Path

import pytest
import torch

from baton.process.own_thread import in_own_thread
from tests.support.eventually import eventually


def threads() -> set[str]:
    """The threads of this process, those included that Python does not know."""
    return {each.name for each in Path("/proc/self/task").iterdir()}


def compute() -> set[str]:
    """Computes on two threads; returns the threads that there were then."""
    torch.set_num_threads(2)
    assert torch.ones(512, 512).mm(torch.ones(512, 512)).sum().item() == 512**3
    return threads()


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
async def test_the_team_of_a_call_ends_with_it() -> None:
    num_threads = torch.get_num_threads()
    try:
        await in_own_thread(compute)  # begins what torch begins once in a process
        before = threads()
        during = await in_own_thread(compute)
    finally:
        torch.set_num_threads(num_threads)
    assert len(during - before) >= 2, "its own thread and one of its team"

    async def left() -> set[str]:
        return threads() & (during - before)

    await eventually(left, lambda names: not names)


async def test_an_error_of_the_call_comes_back() -> None:
    def fail() -> None:
        raise ValueError(threading.current_thread().name)

    with pytest.raises(ValueError, match="own-thread"):
        await asyncio.wait_for(in_own_thread(fail), 60)


async def test_the_thread_has_ended_when_the_call_returns() -> None:
    ran: list[threading.Thread] = []
    for _ in range(200):  # a thread that is not waited for outlives its result in some of them
        await in_own_thread(lambda: ran.append(threading.current_thread()))
        assert not ran.pop().is_alive()


async def test_a_cancelled_call_is_not_waited_for() -> None:
    began, release = threading.Event(), threading.Event()

    def wait() -> bool:
        began.set()
        return release.wait(60)

    call = asyncio.create_task(in_own_thread(wait))
    try:
        await asyncio.to_thread(began.wait, 60)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not release.is_set()
    finally:
        release.set()
