"""Functions for background tasks: loops that run until their task is cancelled, such as supervision and heartbeats, and
operations that are retried until they succeed.

If an operation fails, the failure is logged and reported, and the operation is repeated after a pause. Runs on the
event loop of the caller.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

from baton.errors import BatonError
from baton.process.backoff import Backoff

logger = logging.getLogger(__name__)

T = TypeVar("T")
Report = Callable[[str], None]
"""Function that shows one line of text to the user."""


async def repeat(
    what: str, turn: Callable[[], Awaitable[None]], pauses: Backoff, report: Report | None = None
) -> NoReturn:
    """Call `turn` again and again until this task is cancelled. If a call fails, log and report the failure, and call
    `turn` again after a delay that `pauses` determines. `what` names the work in the report."""
    while True:
        await until_done(what, turn, pauses, report)


async def until_done(what: str, step: Callable[[], Awaitable[T]], pauses: Backoff, report: Report | None = None) -> T:
    """Call `step` until it succeeds, and return its result. After each failure, wait for a delay that `pauses`
    determines.

    Each failure is logged, with a traceback unless it is a BatonError. It is also reported in one line that contains
    `what`. The only error that is raised is the cancellation of this task.
    """
    num_failures = 0
    while True:
        try:
            return await step()
        except asyncio.CancelledError as error:
            if is_task_cancelled():
                raise
            failure: BaseException = error  # grpc.aio raises it for a call whose channel was closed
        except Exception as error:  # noqa: BLE001 - logged by tell_failure, with its traceback
            failure = error
        num_failures += 1
        pause_s = pauses.after(num_failures)
        tell_failure(f"{what} failed; retrying in {pause_s:g} s", failure, report)
        await asyncio.sleep(pause_s)


def tell_failure(what: str, error: BaseException | None, report: Report | None = None) -> None:
    """Log a failure, and report it in one line if `report` is given. The traceback is logged unless the error is a
    BatonError. Never raises an error."""
    is_foreseen = isinstance(error, BatonError)
    text = what if error is None else f"{what} ({describe(error)})"
    logger.log(logging.WARNING if is_foreseen else logging.ERROR, "%s", text, exc_info=None if is_foreseen else error)
    if report is None:
        return
    try:
        report(text)
    except Exception:
        logger.exception("could not report: %s", text)


def describe(error: BaseException) -> str:
    """Return a description of an error in one line: the error's text, preceded by the name of its class unless the
    error is a BatonError."""
    return str(error) if isinstance(error, BatonError) else f"{type(error).__name__}: {error}"


def tell_end(what: str, report: Report | None = None) -> Callable[[asyncio.Task[Any]], None]:
    """Return a done-callback for a task that should run forever. If the task ends, even without an error, the callback
    logs and reports that `what` (the name of the task) has ended, with the error if there is one."""

    def tell(task: asyncio.Task[Any]) -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        tell_failure(f"{what} has ended for good: restart the cluster", error, report)

    return tell


def is_task_cancelled() -> bool:
    """Return True if the running task is being cancelled. Use it when CancelledError was raised, because grpc raises
    the same error for a cancelled call."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
