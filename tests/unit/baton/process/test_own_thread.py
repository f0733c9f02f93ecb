"""A thread of its own leaves no team of OpenMP's threads behind, which would slow the teams of others down."""

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

    await eventually(left, lambda names: not names, within_s=10)


async def test_an_error_of_the_call_comes_back() -> None:
    def fail() -> None:
        raise ValueError(threading.current_thread().name)

    with pytest.raises(ValueError, match="own-thread"):
        await asyncio.wait_for(in_own_thread(fail), 10)
