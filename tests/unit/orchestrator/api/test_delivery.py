"""Messages to a client that reads, reads slowly or not at all; a call ends within its bounds in each case."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from baton.errors import BatonError, DeadlineExceededError, ResourceExhaustedError
from orchestrator.api import delivery
from orchestrator.api.delivery import deliver

WAIT_S = 60.0


class Reader:
    """A call's context, whose client has room for `room` messages more."""

    def __init__(self, room: int = 0) -> None:
        self.got: list[int] = []
        self.room = asyncio.Semaphore(room)

    async def write(self, message: int) -> None:
        await self.room.acquire()
        self.got.append(message)


async def messages(num: int) -> AsyncIterator[int]:
    for number in range(num):
        yield number


@pytest.mark.parametrize(
    ("stalled_s", "left_s", "error"),
    [
        (0.0, None, ResourceExhaustedError),
        (0.0, 1e6, ResourceExhaustedError),
        (1e6, -1.0, DeadlineExceededError),
    ],
)
async def test_a_call_that_is_not_read_ends(
    stalled_s: float, left_s: float | None, error: type[BatonError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "STALLED_S", stalled_s)
    reader = Reader(room=2)
    with pytest.raises(error, match=r"read nothing for|not read all"):
        await asyncio.wait_for(deliver(reader, messages(9), left_s), WAIT_S)
    assert reader.got == [0, 1]


async def test_a_client_that_reads_slowly_gets_all(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    monkeypatch.setattr(delivery, "STALLED_S", 1e-3)  # the whole takes many times as long, no message does
    monkeypatch.setattr(delivery._Watch, "_give_up", lambda watch, error: looks.append(error))
    reader, loop = Reader(), asyncio.get_running_loop()
    now_s = [0.0]
    monkeypatch.setattr(loop, "time", lambda: now_s[0])
    task = asyncio.create_task(deliver(reader, messages(50), None))
    while not task.done():
        now_s[0] += 0.9e-3
        reader.room.release()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert (reader.got, looks) == (list(range(50)), [])


async def test_waiting_for_a_message_is_not_the_clients_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "STALLED_S", 0.0)
    reader, coming = Reader(room=9), asyncio.Event()

    async def late() -> AsyncIterator[int]:
        yield 0
        await coming.wait()
        yield 1

    task = asyncio.create_task(deliver(reader, late(), 1e6))
    for _ in range(20):
        await asyncio.sleep(0)
    coming.set()
    await asyncio.wait_for(task, WAIT_S)
    assert reader.got == [0, 1]


async def test_a_call_that_its_client_cancels_is_cancelled() -> None:
    task = asyncio.create_task(deliver(Reader(), messages(9), None))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
