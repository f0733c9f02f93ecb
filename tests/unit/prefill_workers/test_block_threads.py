"""Work on blocks: what sinks is bounded, and what it evicted is told."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from prefill_workers import block_threads
from prefill_workers.block_threads import BlockThreads
from tests.support.engines.chains import WAIT_S
from tests.support.eventually import eventually


@pytest.fixture
async def threads() -> AsyncIterator[BlockThreads]:
    made = BlockThreads()
    yield made
    await asyncio.to_thread(made.close)


async def test_beyond_the_bound_nothing_more_waits_for_the_disk(
    threads: BlockThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_threads, "_MAX_SINKING", 3)
    opened, gone = threading.Event(), set[str]()

    def sink(name: str) -> list[str]:
        assert opened.wait(WAIT_S)
        return [name]

    async def told() -> set[str]:
        gone.update(threads.take_evicted())
        return gone

    for index in range(5):
        threads.sink(lambda name=str(index): sink(name))  # type: ignore[misc]
    opened.set()
    await eventually(told, lambda names: "2" in names, WAIT_S)
    threads.sink(lambda: sink("later"))  # there is room again
    await eventually(told, lambda names: "later" in names, WAIT_S)
    assert gone == {"0", "1", "2", "later"}
