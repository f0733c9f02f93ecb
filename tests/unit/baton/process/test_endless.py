"""A loop that must not end goes on after any exception, says what failed, and ends when it is told to."""

import asyncio
import logging

import pytest

from baton.errors import UnavailableError
from baton.process.backoff import Backoff
from baton.process.endless import repeat, tell_end, until_done

QUICK = Backoff(0.001, 0.002)


class Turns:
    """Turns that fail as listed, then set `done`."""

    def __init__(self, *failures: BaseException) -> None:
        self.failures = list(failures)
        self.done = asyncio.Event()

    async def __call__(self) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.done.set()
        await asyncio.Event().wait()


async def run(turns: Turns, reports: list[str]) -> None:
    """Repeats the turns until they are done, and cancels then."""
    task = asyncio.create_task(repeat("the watch", turns, QUICK, reports.append))
    await asyncio.wait_for(turns.done.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_every_failure_is_told_and_followed_by_another_turn(caplog: pytest.LogCaptureFixture) -> None:
    reports: list[str] = []
    await run(Turns(OSError(24, "Too many open files"), UnavailableError("not now"), ValueError("a bug")), reports)
    assert reports == [
        "the watch failed; retrying in 0.001 s (OSError: [Errno 24] Too many open files)",
        "the watch failed; retrying in 0.002 s (not now)",
        "the watch failed; retrying in 0.002 s (ValueError: a bug)",
    ]
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.WARNING, logging.ERROR]
    assert [bool(record.exc_info) for record in caplog.records] == [True, False, True]


async def test_a_cancellation_that_nobody_asked_for_is_a_failure_of_its_turn() -> None:
    reports: list[str] = []
    await run(Turns(asyncio.CancelledError()), reports)
    assert reports == ["the watch failed; retrying in 0.001 s (CancelledError: )"]


async def test_a_step_is_tried_until_it_succeeds() -> None:
    failures: list[BaseException] = [OSError(28, "No space left on device"), UnavailableError("not now")]

    async def step() -> int:
        if failures:
            raise failures.pop(0)
        return 7

    reports: list[str] = []
    assert await until_done("the step", step, QUICK, reports.append) == 7
    assert len(reports) == 2


async def test_a_report_that_fails_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    turns = Turns(RuntimeError("a"))

    def refuse(line: str) -> None:
        raise BrokenPipeError("the terminal is gone")

    task = asyncio.create_task(repeat("the watch", turns, QUICK, refuse))
    await asyncio.wait_for(turns.done.wait(), 60)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert "the terminal is gone" in caplog.text


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_an_end_is_told(is_cancelled: bool) -> None:
    reports: list[str] = []

    async def end() -> None:
        if is_cancelled:
            raise asyncio.CancelledError
        raise LookupError("gone")

    task = asyncio.create_task(end())
    task.add_done_callback(tell_end("the watch", reports.append))
    await asyncio.wait({task})
    await asyncio.sleep(0)
    what = "CancelledError: " if is_cancelled else "LookupError: gone"
    assert reports == [f"the watch has ended for good: restart the cluster ({what})"]
