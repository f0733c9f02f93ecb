"""Process of the gateway benchmark: it starts, sends a greeting, and answers one question after the other."""

import asyncio
import contextlib
import gc
import multiprocessing
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Answer = Callable[[Any], Awaitable[Any]]
Role = Callable[..., contextlib.AbstractAsyncContextManager[tuple[Any, Answer]]]
"""Context manager that yields the process's greeting and the function that answers its questions. Must be a
module-level function."""
NewLoop = Callable[[], asyncio.AbstractEventLoop]

_END_S = 20.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Usage:
    """Resources that a process has used since it started."""

    cpu_s: float
    """Processor time of all threads, in seconds."""
    loop_s: float
    """Processor time of the main thread, in seconds."""
    rss_bytes: int


class Child:
    """Parent's end of the pipe to a process."""

    def __init__(self, greeting: Any, pipe: Connection) -> None:
        self.greeting = greeting
        self._pipe = pipe

    async def ask(self, question: Any) -> Any:
        """Send a question and return the process's answer. Raises EOFError when the process has died."""
        self._pipe.send(question)
        return await asyncio.to_thread(self._pipe.recv)


@contextlib.asynccontextmanager
async def child(role: Role, *args: Any, new_loop: NewLoop | None = None) -> AsyncIterator[Child]:
    """Start a process that runs `role(*args)`, on asyncio's default event loop or on one from `new_loop`, and yield it.
    The process ends with the block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, role, args, new_loop), daemon=True)
    process.start()
    theirs.close()  # so that `recv` on our end fails when the process dies
    try:
        yield Child(await asyncio.to_thread(ours.recv), ours)
    finally:
        ours.close()  # this ends the process
        await asyncio.to_thread(process.join, _END_S)
        process.kill()


def usage() -> Usage:
    """Return the resources that this process has used. Call it on the main thread. Garbage is collected first, so that
    it is not counted."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    return Usage(time.process_time(), time.thread_time(), resident)


def _run(pipe: Connection, role: Role, args: tuple[Any, ...], new_loop: NewLoop | None) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_answer(pipe, role, args))


async def _answer(pipe: Connection, role: Role, args: tuple[Any, ...]) -> None:
    async with role(*args) as (greeting, answer):
        pipe.send(greeting)
        while True:
            try:
                question = await asyncio.to_thread(pipe.recv)
            except EOFError:
                return
            pipe.send(await answer(question))
